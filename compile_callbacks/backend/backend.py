"""`InductorBackend`: one module with one config for inference, without a Trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import Self

from compile_callbacks._torch import is_dynamo_wrapper
from compile_callbacks.architecture import architecture_key, class_name
from compile_callbacks.backend.inference import CompiledInference, free_memory
from compile_callbacks.backend.lifecycle import State, allows, next_state
from compile_callbacks.backend.samples import Sample, as_samples
from compile_callbacks.backend.saved_backend import SavedBackend
from compile_callbacks.choices import check_choice
from compile_callbacks.compiling.region_settings import ON_ERROR, OnError, RegionSettings
from compile_callbacks.compiling.shapes import NEW_SHAPES, NewShapes
from compile_callbacks.compiling.sharding import check_whole
from compile_callbacks.compiling.switch import compiled_parts
from compile_callbacks.devices.placement import Placement, as_device
from compile_callbacks.links import checks_settings, see
from compile_callbacks.reporting.report import CompileReport, uncompiled_report
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.mode import Mode, as_config


class InductorBackend:
    """One module, compiled with one config for inference: built on samples, called, put aside, saved and deployed.

    While a backend is active, its module is compiled in place, in evaluation mode, on the backend's device; calls of
    the module itself with grad enabled run eagerly. In each state these calls are allowed, any other raises a
    ``RuntimeError`` (``->``: the state that a call leads to)::

        init: build -> active
        active: infer, deactivate -> inactive, to_dict, key
        inactive: activate -> active, to_dict, key
        checkpoint_loaded: activate -> active, deploy -> deployed, to_dict, key
        deployed: infer, key

    `from_dict` makes a backend that is ``"checkpoint_loaded"``. A call that fails leaves the state as it was. A backend
    that is dropped while it is active leaves its module uncompiled where it is; `deactivate` puts it back.

    Outputs are not compared with eager's, because each sample runs once: ``report.infer.verified`` is ``None``. A
    backend is not made for several threads at once.

    Args:
        mode: Settings, as `InductorCompile` takes them for ``infer_mode``, but for ``"auto"`` and `Tune`; ``None`` and
            ``"eager"``, which compile nothing, are refused. ``freezing`` bakes the weights in.
        on_error: What a failure of the compiler does: ``"eager"`` warns and runs the work eagerly; ``"raise"`` raises
            a `CompileError`, and a backend that is being built stays as it was.
        new_shapes: What an input of a shape does that no sample has: ``"recompile"``; ``"eager"``, run eagerly unless
            a compiled graph fits (a shape that keeps coming back is compiled after all); ``"raise"``.
        name: What messages call the backend; ``None``: ``"InductorBackend"``.

    Raises:
        ValueError: A value that is none of the choices, or an empty name.
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

    @checks_settings
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
        check_choice("on_error", on_error, ON_ERROR)
        check_choice("new_shapes", new_shapes, NEW_SHAPES)
        self._config = config
        self._settings = RegionSettings(on_error=on_error, new_shapes=new_shapes)
        self._name = _as_name(name)
        self._state: State = "init"
        self._module: nn.Module | None = None
        self._device: torch.device | None = None
        self._samples: list[Sample] = []
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
        return allows(self._state, "infer")

    @property
    def name(self) -> str:
        """What messages call the backend."""
        return self._name

    @property
    def config(self) -> InductorConfig:
        """The settings."""
        return self._config

    @property
    def device(self) -> torch.device | None:
        """Where it runs, or will when it is activated; ``None`` before it is built."""
        return self._device

    @property
    def report(self) -> CompileReport:
        """What compiling cost, from the last time on that the backend became active; in ``infer``."""
        if self._compiled is not None:
            self._report = self._compiled.report()
        return self._report

    def key(self) -> str:
        """A hash of the config, the module's architecture and the kind of device: equal for equal, in any process."""
        self._after("key")
        module, device = self._built
        parts = (self._config.key(), architecture_key(module), device.type)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Name, module, settings, device and state, in a line."""
        module = "no module" if self._module is None else class_name(self._module)
        device = "no device" if self._device is None else str(self._device)
        return f"{self._name}: {module}, {self._config.describe()}, {device}, {self._state}"

    def __reduce__(self) -> NoReturn:
        message = "an InductorBackend cannot be copied or pickled; to_dict() and from_dict() save and load it"
        raise TypeError(see(message, "a-backend-in-another-state"))

    # ------------------------------------------------------------------------------------------ its life

    def build(
        self,
        module: nn.Module,
        samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        device: str | torch.device | None = None,
    ) -> Self:
        """Compile a module on samples, each of which runs through it once, without gradients.

        What the samples did to buffers and random number generators is taken back. Where this fails, the module is
        as it was before. With CUDA graphs, the next call with inputs of a sample's shapes records them.

        Args:
            module: The module; its weights are on one device. It is moved, and put into evaluation mode.
            samples: Pairs ``(args, kwargs)`` of one call each, at least one, with tensors of the shapes, dtypes and
                layouts that inference is to have, on any device. They are copied to host memory and kept there.
            device: Where to run; ``None``: where the module is.

        Returns:
            The backend itself, which is active.

        Raises:
            RuntimeError: The backend was built before.
            TypeError: A value of the wrong type; which sample is wrong is named.
            ValueError: No samples, a device that cannot be used, or a module that is compiled already or has its
                weights on several devices.
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
            args: Positional arguments. Tensors in them, also in lists, tuples and dicts, are moved to the device.
            kwargs: Keyword arguments, likewise.

        Returns:
            What the module returns.

        Raises:
            RuntimeError: The backend is not active.
            CompileError: A shape that no sample has, and ``new_shapes="raise"``; or the compiler failed, and
                ``on_error="raise"``.
        """
        self._after("infer")
        assert self._compiled is not None
        return self._compiled(*args, **kwargs)

    def deactivate(self) -> None:
        """Give back compiled code, folded and frozen weights and CUDA graphs, and put the module back.

        It goes to the device that it came from, its parts to the training or evaluation mode that they were in, and
        it runs uncompiled. What others compiled stays compiled. CUDA graphs of one device share their memory: where
        another module has CUDA graphs there, that memory goes back with the last of them.

        Raises:
            RuntimeError: The backend is not active, or is deployed.
            Exception: Whatever moving the module raises; the backend is inactive and the module uncompiled all the
                same.
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
        """Compile again on the samples, which torch's cache on disk makes short; as `build`.

        Raises:
            RuntimeError: The backend is neither inactive nor loaded.
            ValueError: The device cannot be used here, or the module is compiled by now; see `build`.
            CompileError: The compiler failed, and ``on_error="raise"``.
        """
        after = self._after("activate")
        module, device = self._built
        self._start(module, self._samples, device)
        self._state = after

    def deploy(self, device: str | torch.device | None = None) -> None:
        """Compile a loaded backend for good: it cannot be deactivated or saved any more, and its samples are dropped.

        Args:
            device: Where to run; ``None``: on a device of the name that it was saved with.

        Raises:
            RuntimeError: The backend does not come from `from_dict`, or was activated since.
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

    @checks_settings
    def to_dict(self) -> dict[str, Any]:
        """The backend as data that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

        It holds settings, weights and samples, as plain containers, plain values and tensors on the CPU, which share
        memory with a module that is there. It holds no compiled code and no class: `from_dict` is given a module.

        Raises:
            RuntimeError: The backend is not built, or deployed.
            ValueError: Passes, option values, weights or samples that cannot be written down; named.
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
            module=class_name(module),
            state_dict=module.state_dict(),
        )
        return saved.to_dict()

    @classmethod
    @checks_settings
    def from_dict(cls, module: nn.Module, state: Mapping[str, Any]) -> Self:
        """A backend that `to_dict` made ``state`` of, to be activated or deployed.

        Graph passes in it are imported by the names that stand there; load no data that you would not run.

        Args:
            module: A module of the same class, built alike. The saved weights are loaded into it; it stays where it is.
            state: The data.

        Raises:
            TypeError: A module or data of the wrong type.
            ValueError: Data of another format or version, or of another module; the module is as it was then.
                Or a module that is compiled already, has its weights on several devices, or without values.
        """
        _check_module(module)
        Placement(module)
        saved = SavedBackend.from_dict(state)
        backend = cls(saved.config, on_error=saved.on_error, new_shapes=saved.new_shapes, name=saved.name)
        saved.load_into(module)
        backend._module, backend._samples, backend._device = module, list(saved.samples), saved.device
        backend._state = "checkpoint_loaded"
        return backend

    # ------------------------------------------------------------------------------------------ what these call

    def _after(self, call: str) -> State:
        return next_state(self._name, self._state, call)

    @property
    def _built(self) -> tuple[nn.Module, torch.device]:
        """The module and the device, which every state has but the first."""
        assert self._module is not None
        assert self._device is not None
        return self._module, self._device

    def _start(self, module: nn.Module, samples: Sequence[Sample], device: str | torch.device) -> None:
        _check_module(module)
        there = as_device(device)
        self._compiled = CompiledInference(module, samples, there, self._config, self._settings)
        self._device = there


def _as_name(name: object) -> str:
    if name is None:
        return "InductorBackend"
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string or None, not {type(name).__name__}")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"name={name!r} must be a line of text that is not empty")
    return name


@checks_settings
def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a torch.nn.Module, not {type(module).__name__}")
    if is_dynamo_wrapper(module):
        raise ValueError("module is what torch.compile returned; give the module that it was given")
    check_whole(module)
    if compiled := compiled_parts(module):
        message = (
            f"module is compiled by this library already, at {', '.join(map(repr, compiled))}; undo that first: "
            "deactivate() where an InductorBackend compiled it, or restore()"
        )
        raise ValueError(see(message, "compiled-already"))
