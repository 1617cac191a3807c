"""Compares a compiled target with the eager one on its first batch, and leaves no trace of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.compiling.errors import CompileError
from compile_callbacks.compiling.snapshot import Snapshot

Verify = Literal["off", "warn", "eager", "raise"]
"""What a difference between compiled and eager does: not looked for, a warning, eager from then on, an error."""

VERIFY: tuple[Verify, ...] = get_args(Verify)

_SHAKES = 3  # changes of the inputs, each a sample of what rounding may do

_SAMPLED = 2.0  # rounding may do more than what a few samples show

_NO_DIGITS = 1 / 8  # what last bits of the inputs change by so much has no digits to compare

_NOISE_SPREAD = 16.0  # norms of gradients that are nothing but rounding, of sums in another order: up to 4 measured

_TF32_EPS = 2.0**-10  # TF32 keeps ten bits of the mantissa


@dataclass(frozen=True)
class Comparison:
    """How compiled and eager differ.

    Attributes:
        max_abs_error: Largest absolute difference of an output's element; ``None`` where nothing was compared.
        problem: What differs by more than the tolerance; ``None`` where nothing does.
        left_out: Why nothing was compared; ``None`` where it was.
    """

    max_abs_error: float | None = None
    problem: str | None = None
    left_out: str | None = None


class CompiledCallFailedError(Exception):
    """A compiled call raised ``error``, forward or backward, where eager raised nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def compare_with_eager(
    module: nn.Module, eager: Callable[..., Any], compiled: Callable[..., Any], args: Any, kwargs: Any
) -> Comparison:
    """Run a call eagerly and compiled, and compare outputs and, where grad is enabled, gradients.

    Random number generators, buffers and ``.grad`` are as before afterwards. Outputs are compared by the norm
    of their difference over the norm of the eager output; gradients by their norms, tensor by tensor, so that no
    copy of them is kept. They must agree to `tolerance`, half of the digits that the arithmetic carries, and to
    `gradient_tolerance`. Where they do not, eager runs a few times more on inputs that differ in their last bits, and
    twice what that changes is allowed. A small gradient that it changes by more than its tolerance, and any that it
    changes by an eighth, is nothing but rounding: that of a bias before a batch norm is a sum of what adds up to zero,
    and what is left of it depends on the order in which it is added.

    Nothing is compared where the target draws random numbers (dropout), as Inductor draws others than eager does, or
    writes to its weights, which then are written to once more than without the comparison.

    Args:
        module: The target's module.
        eager: The target, uncompiled.
        compiled: The target, compiled.
        args: Positional inputs.
        kwargs: Inputs by name.

    Raises:
        CompiledCallFailedError: Compiled, the call or its backward pass raises. Not where the compiler itself does.
    """
    try:
        with _as_before(module) as before:
            expected = _run(module, eager, *_apart(args, kwargs))
            left_out = _why_not_comparable(before)
        if left_out is not None:
            return Comparison(left_out=left_out)
        with _as_before(module), _failures_of_compiled_code():
            actual = _run(module, compiled, *_apart(args, kwargs))
        allowed = tolerance(module, [*expected.outputs, *_torch.tree_leaves((args, kwargs))])
        compared = _compare(expected, actual, allowed)
        shaken: list[_Run] = []
        for number in range(_SHAKES):
            # A target may hold collectives of the user's: all processes call it equally often.
            if compared.problem is None and not _among_others():
                break
            run = _shaken(module, eager, args, kwargs, allowed, number)
            if run is not None and run.is_like(expected):
                shaken.append(run)
                compared = _compare(expected, actual, allowed, shaken)
    except torch.OutOfMemoryError as error:
        return Comparison(left_out=_no_memory(error))
    return compared


def why_not_alone(module: nn.Module) -> str | None:
    """Why one process is not to call a module more often than another, which may fail to compile it."""
    synced = any(isinstance(part, nn.SyncBatchNorm) and part.training for part in module.modules())
    return _SYNCED if synced and _among_others() else None


def call_and_compare(
    module: nn.Module, eager: Callable[..., Any], compiled: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Comparison, Any]:
    """Make a compiled call and compare its outputs with eager's; for CUDA graphs, which take no call beside it.

    Torch records CUDA graphs in the order of calls and lets the end of one backward free the memory of all, so
    that one call too many spoils the gradients of the step. Gradients are not compared. Arguments are those of
    `compare_with_eager`.

    Returns:
        The comparison, and what the compiled call gave: ``None``, with buffers and generators as before the
        call, where it differs from eager.

    Raises:
        CompiledCallFailedError: The compiled call raises.
    """
    try:
        with _as_before(module) as before, torch.no_grad():
            expected = _run(module, eager, *_apart(args, kwargs))
            left_out = _why_not_comparable(before)
    except torch.OutOfMemoryError as error:
        left_out = _no_memory(error)
    if left_out is not None:
        return Comparison(left_out=left_out), compiled(*args, **kwargs)
    before = Snapshot(module)
    with _failures_of_compiled_code():
        result = compiled(*args, **kwargs)
    actual = _Run([leaf for leaf in _torch.tree_leaves(result) if isinstance(leaf, torch.Tensor)])
    allowed = tolerance(module, [*expected.outputs, *_torch.tree_leaves((args, kwargs))])
    with torch.no_grad():
        compared = _compare(expected, actual, allowed)
    if compared.problem is None:
        return compared, result
    before.restore()
    return compared, None


def tolerance(module: nn.Module, tensors: list[Any]) -> float:
    """The relative difference that rounding may make: the square root of the coarsest epsilon in use.

    That is half of the digits: 3.5e-4 in float32, 0.03 in float16 and TF32, 0.09 in bfloat16. Compiled code adds
    up in another order and keeps intermediate results longer in float32, so the last digits differ; a stale
    weight or a wrong kernel differs in the first ones.
    """
    dtypes = {t.dtype for t in (*module.parameters(), *tensors) if isinstance(t, torch.Tensor)}
    cuda = any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors)
    device = "cuda" if cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    if cuda and torch.float32 in dtypes and _tf32_allowed():
        coarsest = max(coarsest, _TF32_EPS)
    return math.sqrt(coarsest)


def gradient_tolerance(allowed: float) -> float:
    """The relative difference that rounding may make in the norm of a gradient.

    A quarter of the digits, up to 1/64; what is allowed in outputs, where that is more. In float32, where half of the
    digits are 3.5e-4, values that cross a ReLU's zero by rounding moved gradients of small ResNets and MobileNets by
    up to 8e-3 of their norms.
    """
    return max(allowed, min(math.sqrt(allowed), 1 / 64))


def _tf32_allowed() -> bool:
    return torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32


def _last_bits(allowed: float) -> float:
    """How far inputs are changed to see what rounding may do: six bits of float32, the last one of 16-bit floats.

    Measured on a ResNet-18 of 8x8 images in float32: compiled outputs are as far from eager's as when the inputs change
    by ten epsilons, and gradients differ by up to 7e-4 of their norms through ReLUs, by 1e-3 to 3e-3 at 64 epsilons.
    """
    return allowed**2 * min(64.0, max(1.0, 1 / (32 * allowed))) if allowed else 0.0


def _shaken(
    module: nn.Module, eager: Callable[..., Any], args: Any, kwargs: Any, allowed: float, number: int
) -> _Run | None:
    """An eager run on inputs that differ in their last bits; ``None`` where the target does not take them."""
    try:
        with _as_before(module):
            return _run(module, eager, *_apart(args, kwargs, shake=_last_bits(allowed), spared=number + 2))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a user's code makes of inputs that it never gave
        return None


def _among_others() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def _apart(args: Any, kwargs: Any, *, shake: float = 0.0, spared: int = 2) -> tuple[Any, Any]:
    """Copies of the inputs: the target may change them in place, and no gradient goes beyond them.

    Args:
        args: Positional inputs.
        kwargs: Inputs by name.
        shake: How far floating-point values are changed, relative to themselves; by as much where all are zero.
        spared: Each value of this number is left as it is: every other one where it is 2.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # Of its kind: for a tensor made in inference mode Dynamo would compile once more.
        with torch.inference_mode(tensor.is_inference()):
            # Cloned last: a leaf that requires grad cannot be changed in place.
            copied = tensor.detach().requires_grad_(tensor.requires_grad).clone()
            if shake and tensor.is_floating_point():
                # Towards zero: what has to lie in a range, as probabilities have, stays there; zeros towards one.
                changed = torch.arange(1, tensor.numel() + 1, device=tensor.device).remainder(spared).bool()
                with torch.no_grad():
                    by = copied if bool(copied.any()) else copied - 1
                    copied.sub_(by * changed.view(tensor.shape), alpha=shake)
            return copied

    return _torch.tree_map_tensors(copy, args), _torch.tree_map_tensors(copy, kwargs)


@dataclass
class _Run:
    """Tensors among a call's outputs, and the norms of its gradients where there are any."""

    outputs: list[torch.Tensor]
    gradient_norms: list[float] = field(default_factory=list)

    @property
    def largest_gradient_norm(self) -> float:
        return max(filter(math.isfinite, self.gradient_norms), default=0.0)

    def is_like(self, other: _Run) -> bool:
        """Whether it gave as many gradients, and outputs of the same shapes."""
        shapes = [[output.shape for output in run.outputs] for run in (self, other)]
        return shapes[0] == shapes[1] and len(self.gradient_norms) == len(other.gradient_norms)


def _run(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> _Run:
    outputs = [leaf for leaf in _torch.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    copies = [output.detach().clone() for output in outputs]
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not torch.is_grad_enabled():
        return _Run(copies)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Ones would have no gradient through a softmax or a layer norm, and a ramp's sums over a batch cancel, so that
    # little but rounding is left in the gradient of a bias.
    directions = [_random_like(output) for output in differentiable]
    gradients = torch.autograd.grad(differentiable, weights, directions, allow_unused=True) if weights else ()
    norms = [torch.zeros(()) if g is None else torch.linalg.vector_norm(g.float()) for g in gradients]
    return _Run(copies, [float(norm) for norm in norms])


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Values from -1 to 1, the same ones in each call, without a draw from the user's generators."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    return torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype).mul_(2).sub_(1)


def _compare(expected: _Run, actual: _Run, allowed: float, shaken: Sequence[_Run] = ()) -> Comparison:
    """Compare two runs; ``shaken`` are eager's with inputs that differ in their last bits."""
    if [e.shape for e in expected.outputs] != [a.shape for a in actual.outputs]:
        return Comparison(max_abs_error=math.inf, problem="outputs have other shapes than eager's")
    if len(expected.gradient_norms) != len(actual.gradient_norms):
        numbers = len(actual.gradient_norms), len(expected.gradient_norms)
        return Comparison(max_abs_error=math.inf, problem="{} weights get a gradient, with eager {}".format(*numbers))
    max_abs_error, problem = 0.0, None
    for index, (e, a) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        apart, relative = _difference(e, a)
        max_abs_error = max(max_abs_error, apart)
        may = max([allowed, *(_SAMPLED * _difference(e, run.outputs[index])[1] for run in shaken)])
        if not relative <= may and problem is None:
            problem = f"output {index} is off by {relative:.2g} of its norm, where rounding may make {may:.2g}"
    gradients = zip(_gradients_off(expected, actual, allowed), _gradients_may(expected, allowed, shaken), strict=True)
    for index, (off, may) in enumerate(gradients):
        if not off <= may and problem is None:
            problem = f"the norm of gradient {index} is off by {off:.2g}, where rounding may make {may:.2g}"
    return Comparison(max_abs_error=max_abs_error, problem=problem)


def _gradients_off(expected: _Run, actual: _Run, smallest: float) -> list[float]:
    """How far the norm of each gradient is off, relative to what eager gives, or to ``smallest`` times the largest."""
    least = max(smallest * expected.largest_gradient_norm, 1e-30)

    def off(e_norm: float, a_norm: float) -> float:
        same = a_norm == e_norm or (math.isnan(a_norm) and math.isnan(e_norm))
        return 0.0 if same else abs(a_norm - e_norm) / max(e_norm, least)

    return [off(*norms) for norms in zip(expected.gradient_norms, actual.gradient_norms, strict=True)]


def _gradients_may(expected: _Run, allowed: float, shaken: Sequence[_Run]) -> Iterator[float]:
    """How far rounding may make the norm of each gradient differ."""
    may = gradient_tolerance(allowed)
    changes = [_gradients_off(expected, run, 0.0) for run in shaken]
    for index, norm in enumerate(expected.gradient_norms):
        change = max((run[index] for run in changes), default=0.0)
        nothing_but_rounding = change > (may if norm < may * expected.largest_gradient_norm else _NO_DIGITS)
        yield _NOISE_SPREAD if nothing_but_rounding else max(may, _SAMPLED * change)


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and relative difference; NaN and infinity are equal to themselves."""
    same = (expected == actual) | ((expected != expected) & (actual != actual))
    if bool(same.all()):
        return 0.0, 0.0
    if not expected.is_floating_point():
        return float((~same).sum()), float((~same).double().mean())
    apart = torch.where(same, 0, (actual.double() - expected.double()).abs())
    norm = float(torch.linalg.vector_norm(torch.where(expected.isfinite(), expected.double(), 0)))
    return float(apart.max()), float(torch.linalg.vector_norm(apart)) / max(norm, 1e-30)


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[Snapshot]:
    """Puts random number generators and buffers back, and leaves nothing with what counts or keeps saved tensors."""
    snapshot = Snapshot(module)
    try:
        with _torch.beside_activation_checkpoints():
            yield snapshot
    finally:
        snapshot.restore()


@contextlib.contextmanager
def _failures_of_compiled_code() -> Iterator[None]:
    """Tells what compiled code raises, after eager raised nothing, from what else may be raised here."""
    try:
        yield
    except (CompileError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _torch.raised_while_compiling(error):
            raise
        raise CompiledCallFailedError(error) from error


_SYNCED = "its batch norm is synchronised: each call of it waits for a call in every other process"
_DREW = "it draws random numbers, and compiled code draws others than eager code"


_WROTE = "it writes to its own weights, which one more call changes once more"


def _why_not_comparable(before: Snapshot) -> str | None:
    """What the eager call did that no call after it can do again."""
    if before.drew():
        return _DREW
    return _WROTE if before.wrote_weights() else None


def _no_memory(error: torch.OutOfMemoryError) -> str:
    return f"no memory for it: {error}".splitlines()[0]
