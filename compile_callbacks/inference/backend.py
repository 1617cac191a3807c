"""`InductorBackend`: compiles one module with one config for inference, without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from compile_callbacks._torch.dynamo import is_dynamo_wrapper
from compile_callbacks._utils.device import as_device
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks.calls.dispatcher import compiled_target_names
from compile_callbacks.config.inductor_config import InductorConfig, Mode, as_compiling_config
from compile_callbacks.graphs.failures import NewShapes, OnError, TargetSettings, Verify
from compile_callbacks.inference import saved_state
from compile_callbacks.inference.compiled_module import CompiledInference, Placement, free_memory
from compile_callbacks.inference.saved_state import Sample, SampleLike, as_samples
from compile_callbacks.report.build import uncompiled_report
from compile_callbacks.report.report import CompileReport
from compile_callbacks.targets.fsdp import check_not_sharded

State = Literal["init", "active", "inactive", "checkpoint_loaded", "deployed"]

TRANSITIONS: Mapping[State, Mapping[str, State]] = {
    "init": {"build": "active"},
    "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active"},
    "inactive": {"activate": "active", "to_dict": "inactive"},
    "checkpoint_loaded": {"activate": "active", "deploy": "deployed", "to_dict": "checkpoint_loaded"},
    "deployed": {"infer": "deployed"},
}
"""The calls that each state allows, and the state after each call. A call that fails does not change the state."""


class InductorBackend:
    """Compile one module with one config for inference, and build, call, offload, save and deploy it.

    While a backend is active, its module is compiled in place, in evaluation mode, on the backend's device. If you call
    the module itself with grad enabled, it runs eagerly. Each state allows these calls (``->``: the next state). Any
    other call raises a ``RuntimeError``::

        init: build -> active
        active: infer, deactivate -> inactive, to_dict
        inactive: activate -> active, to_dict
        checkpoint_loaded: activate -> active, deploy -> deployed, to_dict
        deployed: infer

    `from_dict` creates a backend in the state ``"checkpoint_loaded"``. A call that fails does not change the state. If
    Python garbage-collects an active backend, its module runs uncompiled and stays on the backend's device. Call
    `deactivate` to move the module back. A backend is not thread-safe.

    Args:
        mode: The settings: a mode of ``torch.compile``, a template's name, an `InductorConfig`, or a mapping of its
            fields. ``freezing`` freezes the weights into the code.
        verify: The reaction if a graph differs from eager by more than rounding explains. The backend compares each
            graph at its first execution. ``"warn"`` warns, ``"eager"`` warns and runs the module eagerly, and
            ``"raise"`` raises a `CompileError`. ``"off"`` skips the comparison.
        on_error: The reaction if the compiler fails: ``"eager"`` warns and runs the module eagerly; ``"raise"`` raises
            a `CompileError`, and `build` does not change the backend.
        new_shapes: The reaction to an input whose shape no sample has. ``"recompile"`` recompiles, up to torch's
            recompile limit. ``"eager"`` runs new shapes eagerly, and compiles a shape that recurs often. ``"raise"``
            raises a `CompileError`.
        name: The backend's name in messages. If ``None``, the name is ``"InductorBackend"``.

    Raises:
        ValueError: If a choice is unknown, the mode compiles nothing, or the name is empty.
        TypeError: If a value has the wrong type.

    Example::

        >>> backend = InductorBackend("max-autotune-no-cudagraphs")
        >>> backend = backend.build(torch.nn.Linear(8, 2), torch.ones(4, 8), device="cpu")
        >>> tuple(backend.infer(torch.zeros(4, 8)).shape)
        (4, 2)
        >>> backend.deactivate()
        >>> backend
        <InductorBackend: Linear, max-autotune-no-cudagraphs, cpu, inactive>
    """

    def __init__(
        self,
        mode: Mode = "default",
        *,
        verify: Verify = "warn",
        on_error: OnError = "eager",
        new_shapes: NewShapes = "recompile",
        name: str | None = None,
    ) -> None:
        self._config = as_compiling_config(mode)
        self._settings = TargetSettings(on_error=on_error, verify=verify, new_shapes=new_shapes)
        self._name = "InductorBackend" if name is None else name
        check_type("name", name, (str, type(None)), "a string or None")
        if not self._name.strip() or not self._name.isprintable():
            raise ValueError(with_code("CC205", f"name={name!r} must be a line of text that is not empty"))
        self._state: State = "init"
        self._module: nn.Module | None = None
        self._device: torch.device | None = None
        self._samples: list[Sample] = []
        self._samples_are_synthetic = False
        self._compiled: CompiledInference | None = None
        self._report = uncompiled_report({"train": None, "infer": self._config})

    @property
    def state(self) -> State:
        """``"init"``, ``"active"``, ``"inactive"``, ``"checkpoint_loaded"`` or ``"deployed"``."""
        return self._state

    @property
    def name(self) -> str:
        """The backend's name in messages."""
        return self._name

    @property
    def config(self) -> InductorConfig:
        """The settings."""
        return self._config

    @property
    def device(self) -> torch.device | None:
        """The device that an active backend uses, or that `activate` will use. ``None`` before `build`."""
        return self._device

    @property
    def report(self) -> CompileReport:
        """The report since the backend last became active. Its figures are in ``report.infer``."""
        if self._compiled is not None:
            self._report = self._compiled.report()
        return self._report

    def __repr__(self) -> str:
        module = "no module" if self._module is None else type(self._module).__qualname__
        device = "no device" if self._device is None else str(self._device)
        return f"<{self._name}: {module}, {self._config.describe()}, {device}, {self._state}>"

    def __reduce__(self) -> NoReturn:
        text = "an InductorBackend cannot be copied or pickled; to_dict() and from_dict() save and load it"
        raise TypeError(with_code("CC607", text))

    def build(
        self,
        module: nn.Module,
        samples: SampleLike | list[SampleLike],
        device: str | torch.device | None = None,
    ) -> Self:
        """Compile a module by calling it once with each sample, without gradients.

        Afterwards, the method restores buffers and random number generators. If the method fails, it restores the
        module. With CUDA graphs, the next call with the shapes of a sample records the CUDA graph.

        Args:
            module: The module, with its weights on one device. The method moves the module to ``device`` and puts it
                into evaluation mode.
            samples: One sample or a list of samples. A sample contains the inputs of one call: a tensor, a tuple of
                positional arguments, or a mapping of keyword arguments. Its tensors have the shapes, dtypes and
                layouts that `infer` will get, on any device. Pass the arguments of `infer` in the same way, by
                position or by name. The backend keeps copies of the samples in CPU memory.
            device: The device to run on. If ``None``, the module's device.

        Returns:
            The active backend itself.

        Raises:
            RuntimeError: If the backend was built before.
            TypeError: If a value has the wrong type. The message names the sample.
            ValueError: If there is no sample, the device cannot be used, the module is already compiled, or its
                weights are on several devices.
            CompileError: If the compiler fails and ``on_error="raise"``, or results differ and ``verify="raise"``.
        """
        after = self._after("build")
        _check_module(module)
        copies = as_samples(samples)
        if device is None:
            device = Placement(module).device or torch.device("cpu")
        self._start(module, device, copies)
        self._module, self._samples, self._state = module, copies, after
        return self

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module, without gradients and in evaluation mode.

        Args:
            args: Positional arguments. The method moves their tensors to the device, also in lists, tuples and dicts.
            kwargs: Keyword arguments. The method moves their tensors, too.

        Returns:
            The module's result.

        Raises:
            RuntimeError: If the backend is not active.
            CompileError: If no sample has the shapes and ``new_shapes="raise"``, if the compiler fails and
                ``on_error="raise"``, or if results differ from eager and ``verify="raise"``.
        """
        if self._compiled is None:
            self._after("infer")
        return self._compiled(*args, **kwargs)  # type: ignore[misc]

    def deactivate(self) -> None:
        """Free compiled code, frozen weights and CUDA graphs, and restore the module.

        The module moves back to its former device, gets its former training flags, and runs uncompiled. Compiled code
        of other modules remains. CUDA graphs of one device share a memory pool. If another module has CUDA graphs on
        the device, torch frees the pool with the last CUDA graph.

        Raises:
            RuntimeError: If the backend is not active, or is deployed.
            Exception: If the module cannot be moved. The backend is inactive and the module uncompiled nevertheless.
        """
        after = self._after("deactivate")
        assert self._compiled is not None
        self._report, compiled = self._compiled.report(), self._compiled
        self._compiled, self._state = None, after
        try:
            compiled.end()
        finally:
            del compiled
            free_memory()

    def activate(self) -> None:
        """Compile the module again, as `build` does. torch's cache on disk makes this fast.

        Raises:
            RuntimeError: If the backend is neither inactive nor loaded.
            ValueError: If the device cannot be used, or the module is already compiled.
            CompileError: For the reasons that `build` lists.
        """
        after = self._after("activate")
        self._start(*self._built)
        self._state = after

    def deploy(self, device: str | torch.device | None = None) -> None:
        """Compile a loaded backend permanently, and delete its samples. A deployed backend only allows `infer`.

        Args:
            device: The device to run on. If ``None``, the saved device.

        Raises:
            RuntimeError: If the backend does not come from `from_dict`, or was activated since then.
            TypeError: If the device has the wrong type.
            ValueError: For the reasons that `activate` lists.
            CompileError: For the reasons that `build` lists.
        """
        after = self._after("deploy")
        module, saved = self._built
        self._start(module, saved if device is None else device)
        self._samples = []
        self._state = after

    def to_dict(self) -> dict[str, Any]:
        """Return the backend as data that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

        The data contain settings and weights as plain containers, plain values and CPU tensors. If the module is on the
        CPU, the tensors share its memory. Of each tensor in a sample, the data contain the shape, dtype and strides but
        not the values, which may be private. Other values of a sample are constants of the compiled graph, and are
        saved. The data contain neither compiled code nor a class, so `from_dict` needs a module.

        Raises:
            RuntimeError: If the backend is not built, or is deployed.
            ValueError: If passes, option values, weights or samples cannot be saved. The message names them.
        """
        self._after("to_dict")
        module, device = self._built
        weights = module.state_dict()
        metadata: Mapping[str, Any] = getattr(weights, "_metadata", {})
        return {
            "format": saved_state.FORMAT,
            "version": saved_state.VERSION,
            "name": self._name,
            "config": self._config.to_dict(),
            "verify": self._settings.verify,
            "on_error": self._settings.on_error,
            "new_shapes": self._settings.new_shapes,
            "device": str(device),
            "module": type(module).__qualname__,
            "state_dict": saved_state.as_plain(dict(weights), "state_dict"),
            # Modules use these versions to load older state_dicts; torch stores them in an attribute.
            "state_dict_metadata": saved_state.as_plain(
                {name: dict(of) for name, of in metadata.items()}, "state_dict_metadata"
            ),
            "samples": saved_state.without_values(self._samples),
        }

    @classmethod
    def from_dict(
        cls,
        module: nn.Module,
        state: Mapping[str, Any],
        *,
        allow_passes: Sequence[str] = (),
        samples: SampleLike | list[SampleLike] | None = None,
    ) -> Self:
        """Load a backend that `to_dict` saved. Then call `activate` or `deploy`, which compiles the module.

        The data cannot run code or a command. `InductorConfig.from_dict` describes which settings it refuses.

        Args:
            module: A module of the same class and architecture. The method loads the saved weights into the module.
            state: The data.
            allow_passes: The import paths of the graph passes that may be imported, ``["module:name"]``. The method
                refuses any other pass.
            samples: The samples to compile on, as `build` takes them. If ``None``, the backend makes tensors with the
                saved shapes, dtypes and strides: floating-point tensors of random numbers, and other tensors of 0.
                Pass samples if values decide the control flow, or if the module refuses a length of 0.

        Raises:
            TypeError: If the module or the data have the wrong type.
            ValueError: If the data have another format or version, or belong to another module. The module is then
                unchanged. Also if the module is already compiled, or its weights are on several devices or have no
                values.
        """
        _check_module(module)
        Placement(module)
        saved = saved_state.check_saved(state)
        backend = cls(
            InductorConfig.from_dict(saved["config"], allow_passes=allow_passes),
            verify=saved["verify"],
            on_error=saved["on_error"],
            new_shapes=saved["new_shapes"],
            name=saved["name"],
        )
        backend._device = saved_state.saved_device(saved)
        backend._samples = as_samples(
            saved_state.with_synthetic_values(saved["samples"]) if samples is None else samples
        )
        backend._samples_are_synthetic = samples is None
        saved_state.load_weights(saved, module)
        backend._module, backend._state = module, "checkpoint_loaded"
        return backend

    def _after(self, call: str) -> State:
        """Return the state after a call. Raise a ``RuntimeError`` if the current state does not allow the call."""
        allowed = TRANSITIONS[self._state]
        if call not in allowed:
            choices = ", ".join(f"{choice}()" for choice in allowed)
            text = f"{self._name}: {call}() is not allowed in the state {self._state!r}; allowed: {choices}"
            raise RuntimeError(with_code("CC606", text))
        return allowed[call]

    @property
    def _built(self) -> tuple[nn.Module, torch.device]:
        """Return the module and the device, which exist in all states except ``"init"``."""
        assert self._module is not None
        assert self._device is not None
        return self._module, self._device

    def _start(self, module: nn.Module, device: str | torch.device, samples: Sequence[Sample] | None = None) -> None:
        _check_module(module)
        checked, samples = as_device(device), self._samples if samples is None else samples
        try:
            self._compiled = CompiledInference(module, samples, checked, self._config, self._settings)
        except Exception as error:
            if self._samples_are_synthetic:
                error.add_note(f"{self._name}: the samples have synthetic values; see from_dict(samples=...)")
            raise
        self._device = checked


def _check_module(module: nn.Module) -> None:
    check_type("module", module, nn.Module, "a torch.nn.Module")
    if is_dynamo_wrapper(module):
        raise ValueError(with_code("CC608", "module is the result of torch.compile; pass the original module"))
    check_not_sharded(module)
    if compiled := compiled_target_names(module):
        text = (
            f"this library already compiled module, at {', '.join(map(repr, compiled))}; undo that first: deactivate() "
            "if an InductorBackend compiled it, or restore()"
        )
        raise ValueError(with_code("CC608", text))
