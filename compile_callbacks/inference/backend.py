"""`InductorBackend`: one module with one config for inference, without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from compile_callbacks._torch.dynamo import is_dynamo_wrapper
from compile_callbacks._utils.device import as_device
from compile_callbacks._utils.fingerprints import architecture_fingerprint, digest
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import Mode, as_config
from compile_callbacks.inference.compiled_module import CompiledInference, Placement, free_memory
from compile_callbacks.inference.saved_state import Sample, SavedBackend, as_samples
from compile_callbacks.report.build import uncompiled_report
from compile_callbacks.report.report import CompileReport
from compile_callbacks.runtime.dispatcher import compiled_target_names
from compile_callbacks.runtime.fsdp import check_not_sharded
from compile_callbacks.runtime.target_settings import NewShapes, OnError, TargetSettings

State = Literal["init", "active", "inactive", "checkpoint_loaded", "deployed"]

TRANSITIONS: Mapping[State, Mapping[str, State]] = {
    "init": {"build": "active"},
    "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active", "key": "active"},
    "inactive": {"activate": "active", "to_dict": "inactive", "key": "inactive"},
    "checkpoint_loaded": {
        "activate": "active",
        "deploy": "deployed",
        "to_dict": "checkpoint_loaded",
        "key": "checkpoint_loaded",
    },
    "deployed": {"infer": "deployed", "key": "deployed"},
}
"""The calls that each state allows, and the state after each; a call that fails does not change the state."""


class InductorBackend:
    """One module, compiled with one config for inference: built on samples, called, offloaded, saved and deployed.

    While a backend is active, its module is compiled in place, in evaluation mode, on the backend's device; calls of
    the module itself with grad enabled run eagerly. Each state allows these calls, and any other call raises a
    ``RuntimeError`` (``->``: the next state)::

        init: build -> active
        active: infer, deactivate -> inactive, to_dict, key
        inactive: activate -> active, to_dict, key
        checkpoint_loaded: activate -> active, deploy -> deployed, to_dict, key
        deployed: infer, key

    `from_dict` creates a backend in the state ``"checkpoint_loaded"``. A call that fails does not change the state. If
    an active backend is garbage-collected, its module runs uncompiled and stays there; `deactivate` moves it back.

    Outputs are not compared with eager, because each sample runs once: ``report.infer.verified`` is ``None``. A backend
    is not thread-safe.

    Args:
        mode: Settings, as `InductorCompile` takes them for ``infer_mode``, except ``"auto"`` and `Tune`; ``None`` and
            ``"eager"`` are refused, because they compile nothing. ``freezing`` freezes the weights into the code.
        on_error: What a failure of the compiler does: ``"eager"`` warns and runs the module eagerly; ``"raise"`` raises
            a `CompileError`, and `build` leaves the backend as it was.
        new_shapes: What an input does whose shape no sample has: ``"recompile"``; ``"eager"``, run eagerly unless a
            compiled graph fits (a shape that recurs often is compiled); ``"raise"``.
        name: The backend's name in messages; ``None``: ``"InductorBackend"``.

    Raises:
        ValueError: An unknown choice, or an empty name.
        TypeError: A value of the wrong type.

    Example::

        >>> backend = InductorBackend("max-autotune-no-cudagraphs")
        >>> backend = backend.build(torch.nn.Linear(8, 2), [((torch.ones(4, 8),), {})], device="cpu")
        >>> tuple(backend.infer(torch.zeros(4, 8)).shape)
        (4, 2)
        >>> backend.deactivate()
        >>> backend.describe()
        'InductorBackend: Linear, max-autotune-no-cudagraphs, cpu, inactive'
    """

    def __init__(
        self,
        mode: Mode = "default",
        *,
        on_error: OnError = "eager",
        new_shapes: NewShapes = "recompile",
        name: str | None = None,
    ) -> None:
        config = as_config(mode, "mode")
        if config is None:
            raise ValueError(f"mode={mode!r} compiles nothing; give a mode of torch.compile, or call the module itself")
        self._config = config
        self._settings = TargetSettings(on_error=on_error, new_shapes=new_shapes)
        self._name = _as_name(name)
        self._state: State = "init"
        self._module: nn.Module | None = None
        self._device: torch.device | None = None
        self._samples: list[Sample] = []
        self._samples_are_synthetic = False
        self._compiled: CompiledInference | None = None
        self._report = uncompiled_report({"train": None, "infer": config})

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def state(self) -> State:
        """``"init"``, ``"active"``, ``"inactive"``, ``"checkpoint_loaded"`` or ``"deployed"``."""
        return self._state

    @property
    def is_active(self) -> bool:
        """Whether `infer` works: active or deployed."""
        return "infer" in TRANSITIONS[self._state]

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
        """The device on which the backend runs, or will run when activated; ``None`` before `build`."""
        return self._device

    @property
    def report(self) -> CompileReport:
        """The report since the backend last became active; its figures are in ``infer``."""
        if self._compiled is not None:
            self._report = self._compiled.report()
        return self._report

    def key(self) -> str:
        """A hash of the config, the module's architecture and the device type, the same in every process."""
        self._after("key")
        module, device = self._built
        return digest([self._config.key(), architecture_fingerprint(module), device.type])

    def describe(self) -> str:
        """Name, module, settings, device and state, in one line."""
        module = "no module" if self._module is None else type(self._module).__qualname__
        device = "no device" if self._device is None else str(self._device)
        return f"{self._name}: {module}, {self._config.describe()}, {device}, {self._state}"

    def __reduce__(self) -> NoReturn:
        message = "an InductorBackend cannot be copied or pickled; to_dict() and from_dict() save and load it"
        raise TypeError(message)

    # ------------------------------------------------------------------------------------------ its life

    def build(
        self,
        module: nn.Module,
        samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        device: str | torch.device | None = None,
    ) -> Self:
        """Compile a module on samples, each of which runs through it once, without gradients.

        Buffers and random number generators are restored afterwards. If this fails, the module is as before. With CUDA
        graphs, the next call with inputs of a sample's shapes records them.

        Args:
            module: The module, with its weights on one device. It is moved, and switched to evaluation mode.
            samples: At least one pair ``(args, kwargs)``, with tensors of the shapes, dtypes and layouts of inference,
                on any device. The backend keeps copies in CPU memory.
            device: The device to run on; ``None``: the module's device.

        Returns:
            The backend itself, which is active.

        Raises:
            RuntimeError: The backend was built before.
            TypeError: A value of the wrong type; the message names the sample.
            ValueError: No samples, a device that cannot be used, or a module that is already compiled or has weights on
                several devices.
            CompileError: The compiler failed, and ``on_error="raise"``.
        """
        after = self._after("build")
        _check_module(module)
        kept = as_samples(samples)
        if device is None:
            device = Placement(module).device or torch.device("cpu")
        self._start(module, kept, device)
        self._module, self._samples, self._state = module, kept, after
        return self

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module, without gradients and in evaluation mode.

        Args:
            args: Positional arguments. Their tensors, also in lists, tuples and dicts, are moved to the device.
            kwargs: Keyword arguments, likewise.

        Returns:
            The module's result.

        Raises:
            RuntimeError: The backend is not active.
            CompileError: A shape that no sample has, and ``new_shapes="raise"``; or the compiler failed, and
                ``on_error="raise"``.
        """
        self._after("infer")
        assert self._compiled is not None
        return self._compiled(*args, **kwargs)

    def deactivate(self) -> None:
        """Free compiled code, folded and frozen weights and CUDA graphs, and restore the module.

        The module returns to its former device, its submodules to their former training flags, and it runs uncompiled.
        Code that other owners compiled stays. CUDA graphs of one device share a memory pool: if another module has CUDA
        graphs there, the pool is freed with the last of them.

        Raises:
            RuntimeError: The backend is not active, or is deployed.
            Exception: Moving the module failed; the backend is inactive and the module uncompiled nevertheless.
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
        """Compile again on the samples, as `build` does; torch's cache on disk makes this fast.

        Raises:
            RuntimeError: The backend is neither inactive nor loaded.
            ValueError: The device cannot be used, or the module is already compiled; see `build`.
            CompileError: The compiler failed, and ``on_error="raise"``.
        """
        after = self._after("activate")
        module, device = self._built
        self._start(module, self._samples, device)
        self._state = after

    def deploy(self, device: str | torch.device | None = None) -> None:
        """Compile a loaded backend permanently: it cannot be deactivated or saved, and its samples are deleted.

        Args:
            device: The device to run on; ``None``: the saved one.

        Raises:
            RuntimeError: The backend does not come from `from_dict`, or was activated since then.
            TypeError: A device of the wrong type.
            ValueError: As `activate`.
            CompileError: The compiler failed, and ``on_error="raise"``.
        """
        after = self._after("deploy")
        module, saved_device = self._built
        self._start(module, self._samples, saved_device if device is None else device)
        self._samples = []
        self._state = after

    # ------------------------------------------------------------------------------------------ saved and loaded

    def to_dict(self) -> dict[str, Any]:
        """The backend as data that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

        The data are settings and weights as plain containers, plain values and tensors on the CPU, which share memory
        with a module on the CPU. Of a tensor in a sample they contain shape, dtype and strides, never the values, which
        may be private. Other values of a sample are constants of the compiled graph, and are saved. The data contain no
        compiled code and no class: `from_dict` takes a module.

        Raises:
            RuntimeError: The backend is not built, or deployed.
            ValueError: Passes, option values, weights or samples that cannot be saved; the message names them.
        """
        self._after("to_dict")
        module, device = self._built
        saved = SavedBackend(
            name=self._name,
            config=self._config,
            on_error=self._settings.on_error,
            new_shapes=self._settings.new_shapes,
            device=device,
            samples=self._samples,
            module=type(module).__qualname__,
            state_dict=module.state_dict(),
        )
        return saved.to_dict()

    @classmethod
    def from_dict(
        cls,
        module: nn.Module,
        state: Mapping[str, Any],
        *,
        allow_passes: Sequence[str] = (),
        samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] | None = None,
    ) -> Self:
        """Load a backend that `to_dict` saved; `activate` or `deploy` compiles it.

        The data cannot run code or a command; the rules for settings are those of `InductorConfig.from_dict`.

        Args:
            module: A module of the same class and architecture. The saved weights are loaded into it, on its device.
            state: The data.
            allow_passes: The import paths of the graph passes that may be imported, ``["module:name"]``; any other
                pass is refused.
            samples: The samples to compile on, as `build` takes them; ``None``: tensors of the saved samples' shapes,
                dtypes and strides, with random numbers, or integers and booleans of 0. Give samples if the values
                decide the control flow, or if the module refuses a length of 0.

        Raises:
            TypeError: A module or data of the wrong type.
            ValueError: Data of another format or version, or of another module, which is then unchanged; or a module
                that is already compiled, has weights on several devices, or has weights without values.
        """
        _check_module(module)
        Placement(module)
        saved = SavedBackend.from_dict(state, allow_passes=allow_passes, samples=samples)
        backend = cls(saved.config, on_error=saved.on_error, new_shapes=saved.new_shapes, name=saved.name)
        saved.load_into(module)
        backend._module, backend._samples, backend._device = module, list(saved.samples), saved.device
        backend._state, backend._samples_are_synthetic = "checkpoint_loaded", samples is None
        return backend

    # ------------------------------------------------------------------------------------------ what these call

    def _after(self, call: str) -> State:
        """The state after a call; raises a ``RuntimeError`` if the current state does not allow the call."""
        allowed = TRANSITIONS[self._state]
        if call not in allowed:
            choices = ", ".join(f"{choice}()" for choice in allowed)
            raise RuntimeError(
                f"{self._name}: {call}() is not allowed in the state {self._state!r}; allowed in it: {choices}"
            )
        return allowed[call]

    @property
    def _built(self) -> tuple[nn.Module, torch.device]:
        """The module and the device; only the state ``"init"`` has none."""
        assert self._module is not None
        assert self._device is not None
        return self._module, self._device

    def _start(self, module: nn.Module, samples: Sequence[Sample], device: str | torch.device) -> None:
        _check_module(module)
        there = as_device(device)
        try:
            self._compiled = CompiledInference(module, samples, there, self._config, self._settings)
        except Exception as error:
            if self._samples_are_synthetic:
                error.add_note(f"{self._name}: the saved samples have no values; see from_dict(samples=...)")
            raise
        self._device = there


def _as_name(name: object) -> str:
    if name is None:
        return "InductorBackend"
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string or None, not {type(name).__name__}")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"name={name!r} must be a line of text that is not empty")
    return name


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a torch.nn.Module, not {type(module).__name__}")
    if is_dynamo_wrapper(module):
        raise ValueError("module is the result of torch.compile; give the original module")
    check_not_sharded(module)
    if compiled := compiled_target_names(module):
        message = (
            f"module is compiled by this library already, at {', '.join(map(repr, compiled))}; undo that first: "
            "deactivate() if an InductorBackend compiled it, or restore()"
        )
        raise ValueError(message)
