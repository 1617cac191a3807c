"""`InductorBackend`: compiles one module with one config for inference, without a Trainer."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.device import as_device, device_of
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks._utils.signatures import tensors_of
from compile_callbacks.calls.dispatcher import compiled_target_names
from compile_callbacks.config.fast import FAST, Fast
from compile_callbacks.config.inductor_config import InductorConfig, Mode, as_compiling_config
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.graphs.target_log import OnError, TargetSettings, Verify
from compile_callbacks.report.report import CompileReport, uncompiled_report
from compile_callbacks.session.arguments import CompileArguments
from compile_callbacks.session.grad_mode import GradModeSession
from compile_callbacks.targets.fsdp import check_not_sharded
from compile_callbacks.targets.resolve import resolve_targets

State = Literal["init", "active", "inactive", "checkpoint_loaded", "deployed"]

TRANSITIONS: Mapping[State, Mapping[str, State]] = {
    "init": {"build": "active"},
    "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active"},
    "inactive": {"activate": "active", "to_dict": "inactive"},
    "checkpoint_loaded": {"activate": "active", "deploy": "deployed", "to_dict": "checkpoint_loaded"},
    "deployed": {"infer": "deployed"},
}
"""The calls that each state allows, and the state after each call. A call that fails does not change the state."""

FORMAT = {"format": "compile_callbacks.InductorBackend", "version": 1}
"""Identifies saved data. Increase the version with each change that an older version would misread."""

SampleLike = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""The arguments of one call: one tensor, positional arguments, or keyword arguments."""

_Sample = tuple[tuple[Any, ...], dict[str, Any]]


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
            fields. ``freezing`` freezes the weights into the code. ``"fast"`` becomes ``"reduce-overhead"`` on an
            NVIDIA GPU if all samples have the same shapes, otherwise ``"default"``.
        verify: The reaction if a graph differs from eager at its first execution. See `InductorCompile`.
        on_error: The reaction if the compiler fails. See `InductorCompile`. A `build` that raises changes nothing.

    Attributes:
        state: The state.
        config: The settings as an `InductorConfig`. With ``"fast"``, after the first compile.
        device: The device of an active or inactive backend. ``None`` before the first compile.

    Raises:
        ValueError: If a choice is unknown, or the mode compiles nothing.

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
        self.config: InductorConfig | Fast = Fast() if mode == FAST else as_compiling_config(mode)
        self._settings = TargetSettings(on_error=on_error, verify=verify)
        self.state: State = "init"
        self.device: torch.device | None = None
        self._module: nn.Module | None = None
        self._parts: list[nn.Module] = []  # the module and its submodules, to look at their modes in each call
        self._samples: list[_Sample] = []
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
            module: The module. The method moves it to ``device`` and puts it into evaluation mode.
            samples: One sample or a list of samples. A sample contains the inputs of one call, as `infer` will get
                them, by position or by name: a tensor, a tuple of positional arguments, or a mapping of keyword
                arguments. Its tensors have the shapes, dtypes and layouts that `infer` will get, on any device. The
                backend keeps copies in CPU memory.
            device: The device to run on. If ``None``, the module's device.

        Returns:
            The active backend itself.

        Raises:
            TypeError: If a value has the wrong type.
            ValueError: If there is no sample, the device cannot be used, or the module is already compiled.
            CompileError: If the compiler fails and ``on_error="raise"``, or results differ and ``verify="raise"``.
        """
        self._compile("build", module, _as_samples(samples), device)
        return self

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module, without gradients and in evaluation mode, and return its result.

        Inputs that no graph fits, such as inputs with shapes that no sample has, run eagerly. With ``fullgraph``, they
        are compiled.

        Args:
            args: Positional arguments. The method moves their tensors to the device, also in lists, tuples and dicts.
            kwargs: Keyword arguments, with the same moves.

        Raises:
            CompileError: For the reasons that `build` lists.
        """
        self._after("infer")
        return _call(self._parts, self.device, args, kwargs)

    def deactivate(self) -> None:
        """Free compiled code, frozen weights and CUDA graphs, and restore the module.

        The module moves back to its former device, gets its former training flags, and runs uncompiled. CUDA graphs of
        one device share a memory pool, which torch frees with the last CUDA graph on the device.
        """
        after = self._after("deactivate")
        self._report = self.report
        self._session, self.state = None, after
        self._finalizer.detach()
        self._undo.close()

    def activate(self) -> None:
        """Compile the module again, as `build` does. torch's cache on disk makes this fast.

        An inactive backend compiles for its former device, and a loaded backend for the module's device. The method
        raises the errors of `build`.
        """
        self._compile("activate", self._module, self._samples, self.device)

    def deploy(self, device: str | torch.device | None = None) -> None:
        """Compile a loaded backend permanently, and delete its samples. A deployed backend only allows `infer`.

        The backend runs on ``device``, or on the module's device. The method raises the errors of `build`.
        """
        self._compile("deploy", self._module, self._samples, device)
        self._samples = []

    def to_dict(self) -> dict[str, Any]:
        """Return the config and the weights as data for ``torch.save`` and ``torch.load(weights_only=True)``.

        The data are plain containers, plain values and CPU tensors, which share the memory of a module on the CPU. They
        contain neither compiled code nor a class nor samples, so `from_dict` needs a module and samples. An option that
        cannot be saved raises a ``ValueError``.
        """
        self._after("to_dict")
        assert self._module is not None
        assert isinstance(self.config, InductorConfig)
        weights = self._module.state_dict()  # its attribute has the versions of the modules, which torch.save keeps
        for name, value in weights.items():
            weights[name] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
        return {**FORMAT, "state_dict": weights, "config": self.config.to_dict()}

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
            ValueError: If the data have another format or version, or `build` would refuse the module or the samples.
            RuntimeError: If the weights do not fit the module, which torch may then have changed in part.
        """
        _check_module(module)
        is_ours = isinstance(state, Mapping) and FORMAT.items() <= state.items()
        if not is_ours or not {"config", "state_dict"} <= state.keys():
            text = f"state must be data that InductorBackend.to_dict() of this version returned, with {FORMAT}"
            raise ValueError(with_code("CC607", text))
        config = InductorConfig.from_dict(state["config"], passes=passes)
        backend = cls(config, verify=verify, on_error=on_error)
        backend._samples = _as_samples(samples)
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

    def _compile(self, call: str, module: Any, samples: list[_Sample], device: str | torch.device | None) -> None:
        """Move and compile the module, and run each sample once. If this fails, restore the module."""
        after = self._after(call)
        _check_module(module)
        home = device_of(module)
        target = home if device is None else as_device(device)
        settings = self.config
        if isinstance(settings, Fast):  # the samples show whether `infer` gets one set of sizes
            sizes = {tuple(value.shape for _, value in tensors_of(*sample)) for sample in samples}
            settings = Fast({"forward": 1 / len(sizes)})
        arguments = CompileArguments(
            configs={"train": None, "infer": settings},
            target_settings=self._settings,
            mode_arguments={"train": "mode", "infer": "mode"},
        )
        session = GradModeSession(module, resolve_targets(module, ("forward",)), arguments)
        with contextlib.ExitStack() as undo:
            undo.callback(torch.cuda.empty_cache)
            for part in module.modules():
                undo.callback(setattr, part, "training", part.training)
            undo.callback(module.to, home)
            undo.callback(session.discard)
            module.to(target).eval()
            configs = session.begin_by_grad_mode(weights_frozen=True, found_from_module=False)
            session.compile_new_inputs(after=1)
            self._parts = list(module.modules())
            with contextlib.ExitStack() as after_samples:
                after_samples.callback(Snapshot(module).restore)
                for sample in samples:
                    _call(self._parts, target, *copy.deepcopy(sample))
            session.compile_new_inputs(after=math.inf)
            session.check("infer")
            self._undo = undo.pop_all()
        self._module, self._samples, self.device = module, samples, target
        self._session, self.state = session, after
        self.config = configs["infer"] or self.config
        self._finalizer = weakref.finalize(self, session.discard)
        self._finalizer.atexit = False


def _call(parts: list[Any], device: torch.device | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a compiled module, the first of its ``parts``, with tensors that the compiled graphs accept."""
    module = parts[0]
    if True in map(operator.attrgetter("training"), parts):
        module.eval()
    # In inference mode, Inductor would compile another graph, and code outside could not use the outputs.
    with torch.inference_mode(False), torch.no_grad():
        converted = [_accepted(value, device) for value in args]
        return module(*converted, **{name: _accepted(value, device) for name, value in kwargs.items()})


def _accepted(value: Any, device: torch.device | None) -> Any:
    """Return a value with tensors that the compiled graphs accept."""
    if not isinstance(value, torch.Tensor):
        return tree_map_only(torch.Tensor, lambda tensor: _accepted(tensor, device), value)
    value = value.to(device)
    if value.is_inference():
        value = value.clone()
    return value.detach() if value.requires_grad else value


def _as_samples(samples: object) -> list[_Sample]:
    """Check one sample or a list of samples, and copy their tensors to the CPU, so that a call cannot change them."""
    copies: list[_Sample] = []
    for sample in samples if isinstance(samples, list) else [samples]:
        expected = "a tensor, a tuple of positional arguments or a mapping of keyword arguments"
        check_type("sample", sample, (torch.Tensor, tuple, Mapping), expected)
        args = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
        arguments = args, dict(sample) if isinstance(sample, Mapping) else {}
        with torch.inference_mode(False):  # torch compiles another graph for inference tensors
            copies.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), arguments))
    if not copies:
        raise ValueError(with_code("CC609", "samples is empty; compiling a module needs at least one sample"))
    return copies


def _check_module(module: nn.Module) -> None:
    """Check that a backend can compile a module."""
    check_type("module", module, nn.Module, "a torch.nn.Module")
    if _torch.dynamo.is_dynamo_wrapper(module):
        raise ValueError(with_code("CC608", "module is the result of torch.compile; pass the original module"))
    check_not_sharded(module)
    if compiled := compiled_target_names(module):
        text = f"this library already compiled module, at {compiled}; undo that first: deactivate()"
        raise ValueError(with_code("CC608", text))
