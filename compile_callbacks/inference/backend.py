"""`InductorBackend`: compiles one module with one config for inference, without a Trainer."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.device import as_device
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks.calls.dispatcher import compiled_target_names
from compile_callbacks.config.inductor_config import InductorConfig, Mode, as_compiling_config
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.graphs.target_log import OnError, TargetSettings, Verify
from compile_callbacks.inference import saved_state
from compile_callbacks.inference.saved_state import Sample, SampleLike, as_samples
from compile_callbacks.report.report import CompileReport, uncompiled_report
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.grad_mode import GradModeSession
from compile_callbacks.targets.fsdp import check_not_sharded
from compile_callbacks.targets.target import Callee, Target

State = Literal["init", "active", "inactive", "checkpoint_loaded", "deployed"]

TRANSITIONS: Mapping[State, Mapping[str, State]] = {
    "init": {"build": "active"},
    "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active"},
    "inactive": {"activate": "active", "to_dict": "inactive"},
    "checkpoint_loaded": {"activate": "active", "deploy": "deployed", "to_dict": "checkpoint_loaded"},
    "deployed": {"infer": "deployed"},
}
"""The calls that each state allows, and the state after each call. A call that fails does not change the state."""

_is_training = operator.attrgetter("training")


class InductorBackend:
    """Compile one module with one config for inference, and build, call, offload, save and deploy it.

    While a backend is active, its module is compiled in place, in evaluation mode, on the backend's device. If you call
    the module itself with grad enabled, it runs eagerly. If Python garbage-collects an active backend, its module runs
    uncompiled and stays on the backend's device. A backend is not thread-safe.

    Each state allows certain calls, and any other call raises a ``RuntimeError`` that names the allowed calls. A new
    backend has the state ``"init"``. `build` and `activate` lead to ``"active"``, `deactivate` to ``"inactive"``,
    `from_dict` to ``"checkpoint_loaded"``, and `deploy` to ``"deployed"``. A call that fails does not change the state.

    Args:
        mode: The settings: a mode of ``torch.compile``, a template's name, an `InductorConfig`, or a mapping of its
            fields. ``freezing`` freezes the weights into the code.
        verify: The reaction if a graph differs from eager at its first execution. See `InductorCompile`.
        on_error: The reaction if the compiler fails. See `InductorCompile`. A `build` that raises changes nothing.

    Attributes:
        state: The state.
        config: The settings as an `InductorConfig`.
        device: The device of an active or inactive backend. ``None`` before the first compile.

    Raises:
        ValueError: If a choice is unknown, or the mode compiles nothing.
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

    def __init__(self, mode: Mode = "default", *, verify: Verify = "warn", on_error: OnError = "eager") -> None:
        self.config = as_compiling_config(mode)
        self._settings = TargetSettings(on_error=on_error, verify=verify)
        self.state: State = "init"
        self.device: torch.device | None = None
        self._module: nn.Module | None = None
        self._modules: list[nn.Module] = []  # the module and its submodules
        self._samples: list[Sample] = []
        self._session: GradModeSession | None = None
        self._undo = contextlib.ExitStack()
        self._report = uncompiled_report({"train": None, "infer": self.config})

    @property
    def report(self) -> CompileReport:
        """The report since the backend last became active. Its figures are in ``report.infer``."""
        if self._session is not None:
            self._session.check("infer")
            self._report = self._session.report()
        return self._report

    def __repr__(self) -> str:
        module = "no module" if self._module is None else type(self._module).__qualname__
        return f"<InductorBackend: {module}, {self.config.describe()}, {self.device or 'no device'}, {self.state}>"

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
        module. With CUDA graphs, the next call with the shapes of a sample records the CUDA graph. If you call `infer`
        under autocast, call this method under the same autocast: otherwise, the first such call compiles again.

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
            TypeError: If a value has the wrong type. The message names the sample.
            ValueError: If there is no sample, the device cannot be used, the module is already compiled, or its
                weights are on several devices.
            CompileError: If the compiler fails and ``on_error="raise"``, or results differ and ``verify="raise"``.
        """
        self._after("build")
        copies = as_samples(samples)
        self._compile("build", module, copies, device)
        self._samples = copies
        return self

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module, without gradients and in evaluation mode.

        Inputs that no graph fits, such as inputs with shapes that no sample has, run eagerly. With ``fullgraph``, they
        are compiled.

        Args:
            args: Positional arguments. The method moves their tensors to the device, also in lists, tuples and dicts.
            kwargs: Keyword arguments. The method moves their tensors, too.

        Returns:
            The module's result.

        Raises:
            CompileError: If the compiler fails and ``on_error="raise"``, or if results differ from eager and
                ``verify="raise"``.
        """
        if self._session is None:
            self._after("infer")
        return _call(self._modules, self.device, args, kwargs)

    def deactivate(self) -> None:
        """Free compiled code, frozen weights and CUDA graphs, and restore the module.

        The module moves back to its former device, gets its former training flags, and runs uncompiled. CUDA graphs of
        one device share a memory pool, which torch frees with the last CUDA graph on the device.

        Raises:
            Exception: If the module cannot be moved. The backend is inactive and the module uncompiled nevertheless.
        """
        after = self._after("deactivate")
        self._report = self.report
        self._session, self._modules, self.state = None, [], after
        self._finalizer.detach()
        try:
            self._undo.close()
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def activate(self) -> None:
        """Compile the module again, as `build` does. torch's cache on disk makes this fast.

        An inactive backend compiles for its former device, and a loaded backend for the module's device.

        Raises:
            ValueError: If the device cannot be used, or the module is already compiled.
            CompileError: For the reasons that `build` lists.
        """
        self._compile("activate", self._module, self._samples, self.device)

    def deploy(self, device: str | torch.device | None = None) -> None:
        """Compile a loaded backend permanently, and delete its samples. A deployed backend only allows `infer`.

        Args:
            device: The device to run on. If ``None``, the module's device.

        Raises:
            TypeError: If the device has the wrong type.
            ValueError: For the reasons that `activate` lists.
            CompileError: For the reasons that `build` lists.
        """
        self._compile("deploy", self._module, self._samples, device)
        self._samples = []

    def to_dict(self) -> dict[str, Any]:
        """Return the config and the weights as data for ``torch.save`` and ``torch.load(weights_only=True)``.

        The data are plain containers, plain values and CPU tensors. If the module is on the CPU, the tensors share its
        memory. The data contain neither compiled code nor a class nor samples, so `from_dict` needs a module and
        samples.

        Raises:
            ValueError: If an option value cannot be saved. The message names it.
        """
        self._after("to_dict")
        assert self._module is not None
        return {**saved_state.state_of(self._module), "config": self.config.to_dict()}

    @classmethod
    def from_dict(
        cls,
        module: nn.Module,
        state: Mapping[str, Any],
        samples: SampleLike | list[SampleLike],
        *,
        passes: Sequence[Any] = (),
        verify: Verify = "warn",
        on_error: OnError = "eager",
    ) -> Self:
        """Load a backend that `to_dict` saved. Then call `activate` or `deploy`, which compiles the module.

        The data cannot run code or a command. `InductorConfig.from_dict` describes which settings it refuses.

        Args:
            module: A module of the same architecture. The method loads the saved weights into the module.
            state: The data.
            samples: The samples to compile on. See `build`.
            passes: The graph passes of the config. See `InductorConfig.from_dict`.
            verify: As in the constructor.
            on_error: As in the constructor.

        Raises:
            TypeError: If the module or a sample has the wrong type.
            ValueError: If the data have another format or version, or their weights do not fit the module. The module
                is then unchanged. Also if there is no sample, the module is already compiled, or its weights are on
                several devices or have no values.
        """
        _check_module(module)
        saved_state.check_state(state, module)
        config = InductorConfig.from_dict(state["config"], passes=passes)
        backend = cls(config, verify=verify, on_error=on_error)
        backend._samples = as_samples(samples)
        module.load_state_dict(state["state_dict"])
        backend._module, backend.state = module, "checkpoint_loaded"
        return backend

    def _after(self, call: str) -> State:
        """Return the state after a call. Raise a ``RuntimeError`` if the current state does not allow the call."""
        allowed = TRANSITIONS[self.state]
        if call not in allowed:
            choices = ", ".join(f"{choice}()" for choice in allowed)
            text = f"InductorBackend: {call}() is not allowed in the state {self.state!r}; allowed: {choices}"
            raise RuntimeError(with_code("CC606", text))
        return allowed[call]

    def _compile(self, call: str, module: Any, samples: Sequence[Sample], device: str | torch.device | None) -> None:
        """Move and compile the module, and run each sample once. If this fails, restore the module."""
        after = self._after(call)
        home, modules = _check_module(module), list(module.modules())
        target = as_device((home or "cpu") if device is None else device)
        arguments = CompileArguments(
            configs={"train": None, "infer": self.config},
            target_settings=self._settings,
            mode_arguments={"train": "mode", "infer": "mode"},
        )
        session = GradModeSession(module, [Target("forward", (Callee("forward", module),))], arguments)
        with contextlib.ExitStack() as undo:
            undo.callback(_restore, modules, list(map(_is_training, modules)), home)
            undo.callback(session.discard)
            module.to(target).eval()
            session.begin_by_grad_mode(weights_frozen=True, found_from_module=False)
            before = Snapshot(module)
            session.compile_new_inputs(after=1)
            try:
                for sample in samples:
                    args, kwargs = saved_state.on_device(sample, target)
                    _call(modules, target, args, kwargs)
            finally:
                before.restore()
            session.compile_new_inputs(after=math.inf)
            session.check("infer")
            self._undo = undo.pop_all()
        self._module, self._modules, self.device, self._session, self.state = module, modules, target, session, after
        self._finalizer = weakref.finalize(self, session.discard)
        self._finalizer.atexit = False


def _call(modules: list[nn.Module], device: torch.device | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a compiled module, the first of ``modules``, with tensors that the compiled graphs accept."""
    if True in map(_is_training, modules):  # faster than any(...), because each call checks this
        modules[0].eval()
    # In inference mode, Inductor would compile another graph, and code outside could not use the outputs.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _call(modules, device, args, kwargs)
    with torch.no_grad():
        converted = [_accepted(value, device) for value in args]
        if kwargs:
            kwargs = {name: _accepted(value, device) for name, value in kwargs.items()}
        return modules[0](*converted, **kwargs)


def _accepted(value: Any, device: torch.device | None) -> Any:
    """Return a value with tensors that the compiled graphs accept."""
    if not isinstance(value, torch.Tensor):
        return tree_map_only(torch.Tensor, lambda tensor: _accepted(tensor, device), value)
    if value.device != device:
        value = value.to(device)
    if value.is_inference():
        value = value.clone()
    return value.detach() if value.requires_grad else value


def _restore(modules: list[nn.Module], training: list[bool], device: torch.device | None) -> None:
    """Move a module, the first of ``modules``, to a device, and set its training flags."""
    if device is not None:
        modules[0].to(device)
    for submodule, flag in zip(modules, training, strict=True):
        submodule.training = flag


def _check_module(module: nn.Module) -> torch.device | None:
    """Check that a backend can compile a module, and return the device of its weights, if it has weights."""
    check_type("module", module, nn.Module, "a torch.nn.Module")
    if _torch.dynamo.is_dynamo_wrapper(module):
        raise ValueError(with_code("CC608", "module is the result of torch.compile; pass the original module"))
    check_not_sharded(module)
    if compiled := compiled_target_names(module):
        text = (
            f"this library already compiled module, at {', '.join(map(repr, compiled))}; undo that first: deactivate() "
            "if an InductorBackend compiled it, or restore()"
        )
        raise ValueError(with_code("CC608", text))
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        text = f"module has weights on {', '.join(sorted(map(str, devices)))}; load and move them to one device first"
        raise ValueError(with_code("CC608", text))
    return next(iter(devices), None)
