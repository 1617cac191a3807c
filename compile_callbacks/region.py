"""One target compiled with one phase's settings, and what happens where the compiler fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from compile_callbacks import _torch
from compile_callbacks.config import InductorConfig
from compile_callbacks.cudagraphs import with_lasting_outputs
from compile_callbacks.events import CompileRecorder, Owner
from compile_callbacks.passes import pass_options
from compile_callbacks.phases import Phase
from compile_callbacks.targets import Target

OnError = Literal["eager", "raise"]
"""What a failure of the compiler does: cost speed, or end the run."""

ON_ERROR: tuple[OnError, ...] = get_args(OnError)


class CompileError(RuntimeError):
    """The compiler failed on a target, and ``on_error="raise"`` was asked for."""


class CompileWarning(UserWarning):
    """Something was not compiled as asked."""


class CompiledRegion:
    """A target compiled for a phase; called in place of the target.

    Each graph is handed to Inductor by a backend of its own, so that every compile is known by target and
    phase, and so that a graph that Inductor fails on runs eagerly, forward and backward, where it stands.

    Args:
        target: What is compiled.
        phase: The phase it is compiled for.
        config: The settings.
        passes: Graph passes to run before those of ``config``.
        recorder: Told of everything that happens.
        on_error: ``"eager"`` or ``"raise"``.
    """

    def __init__(
        self,
        target: Target,
        phase: Phase,
        config: InductorConfig,
        *,
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        on_error: OnError = "eager",
    ) -> None:
        self.target = target
        self.owner = Owner(target.name, phase)
        self.ran = False
        self._eager = target.eager
        self._recorder = recorder
        self._on_error = on_error
        self._warned = False
        self._uncompilable: set[Any] = set()
        self._patches = {**config.resolved_options(), **pass_options((*passes, *config.passes), phase)}
        self._cudagraphs = config.uses_cudagraphs
        self._config = config
        self._guards_hooks = False
        self._hooks_seen = -1
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, compiled for the phase."""
        self.ran = True
        if self._hooks_seen != _torch.hooks_registered():
            self._look_for_hooks()
        if self._uncompilable and signature(args, kwargs) in self._uncompilable:
            return self._eager(*args, **kwargs)
        recorder, outer = self._recorder, self._recorder.owner
        recorder.owner = self.owner
        compiled = self._compiled
        if _torch.SHARES_RECOMPILE_LIMIT and self.owner in recorder.broken:
            compiled = self._compiled_beside_another  # behind a break, both phases' graphs are on the user's code
        try:
            return compiled(*args, **kwargs)
        except _torch.COMPILER_ERRORS as error:
            failure = error
        finally:
            recorder.owner = outer
        return self._without_compiler(failure, args, kwargs)

    def _compile(self) -> None:
        name = "_".join(self.owner).replace(".", "_")
        compiled = _torch.compile_function(
            _torch.function_with_own_cache(_calling(self._eager), name),
            self._backend,
            fullgraph=self._config.fullgraph,
            dynamic=self._config.dynamic,
        )
        if self._guards_hooks:
            compiled = _torch.with_dynamo_settings(compiled, skip_nnmodule_hook_guards=lambda _: False)
        self._compiled = compiled
        self._compiled_beside_another = _torch.with_dynamo_settings(compiled, recompile_limit=lambda limit: 2 * limit)

    def _look_for_hooks(self) -> None:
        """Compile anew where the first hooks were registered: by torch's default a compiled module never learns.

        Guards on hooks would see it too, at a sixth more for each call's guards; so they are paid for only by a
        module that has hooks, whose removal they notice.
        """
        self._hooks_seen = _torch.hooks_registered()
        if not self._guards_hooks and _torch.has_call_hooks(self.target.module):
            self._guards_hooks = True
            self._compile()

    def _backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._recorder.graph_compiled()
        compiled = _torch.compile_graph(
            graph_module,
            example_inputs,
            patches=self._patches,
            fallback=self._may_fall_back,
            on_lowered=lambda seconds, backward: self._recorder.graph_lowered(seconds, is_backward=backward),
        )
        return with_lasting_outputs(compiled) if self._cudagraphs else compiled

    def _may_fall_back(self, error: Exception) -> bool:
        """Whether a graph on which Inductor failed is to run eagerly."""
        if self._on_error == "raise":
            return False
        self._report(error)
        return True

    def _without_compiler(self, failure: Exception, args: Any, kwargs: Any) -> Any:
        """The call done eagerly, after the compiler gave up on it."""
        # Where the error is the user's own, the eager call raises it as it is, with its own traceback.
        result = self._eager(*args, **kwargs)
        if self._on_error == "raise":
            target, phase = self.owner
            raise CompileError(f"compiling target {target!r} for the {phase} phase failed: {failure}") from failure
        self._uncompilable.add(signature(args, kwargs))
        self._report(failure)
        return result

    def _report(self, error: Exception) -> None:
        target, phase = self.owner
        cause = root_cause(error)
        reason = f"{type(cause).__name__}: {cause}".strip()
        self._recorder.add("fallback", self.owner, reason=reason)
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"target {target!r} runs eagerly in the {phase} phase, because the compiler failed: "
            f"{_first_line(reason)} (the whole of it: callback.report.{phase}.events; more: "
            "TORCH_LOGS='+dynamo,+inductor', or on_error='raise')",
            CompileWarning,
            stacklevel=2,
        )


def signature(args: Any, kwargs: Any = None) -> Any:
    """What a call's inputs look like: shapes, dtypes and devices of tensors, types of all else; hashable."""
    if isinstance(args, torch.Tensor):
        return tuple(args.shape), args.dtype, args.device.type, args.requires_grad
    if isinstance(args, dict):
        return tuple((key, signature(value)) for key, value in args.items())
    if isinstance(args, (list, tuple)):
        found = tuple(map(signature, args))
        return (found, signature(kwargs)) if kwargs else found
    return type(args)


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain, which torch wraps in its own."""
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None and cause is not error:
        error = cause
    return error


def _calling(eager: Callable[..., Any]) -> Any:
    # A function of this file: Dynamo compiles nothing where it is handed torch's own _call_impl (traps: torch
    # 2.11 and 2.13 skip frames of torch.nn).
    def region(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    return region


def _first_line(text: str, width: int = 200) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= width else line[: width - 1] + "…"
