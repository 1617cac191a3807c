"""Compares results of compiled code and eager code within rounding errors, for verification and exports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.profiling.events import Result, WhyNot

_TF32_EPS = 2.0**-10  # TF32 keeps ten bits of the mantissa
_EPSILONS = 4  # a few roundings in a row; results that were rounded more often need the float64 run
_CLEAR_FACTOR = 10.0  # without a float64 run, only an error of ten tolerances counts
_MAX_GRADIENT_TOLERANCE = 1 / 64  # values that cross a ReLU's zero moved float32 gradients of ResNets by up to 8e-3
_EAGER_FACTOR = 3.0  # how many times the error of the eager result a compiled result may have
_NOISE = 0.25  # the error of an eager result that says nothing, because rounding alone decides its values
_FAR = 0.5  # an element is far off if its error is larger than this share of its magnitude plus the tensor's
_FEW = 2.0**-10  # the share of elements that may be far off, as where a comparison with zero flips
_WRONG = 0.5  # no rounding error of a tensor is half as large as the tensor itself
_ZERO_ERROR = 2.0**-14  # 512 epsilons of float32: the error that a zero gradient may have, relative to the largest norm
_ZERO = 1e-6  # relative to this error: a gradient that is smaller in float64 is zero
_CHUNK = 2**22  # elements to compare at once, which bounds the memory of a comparison
COMPARISON_BYTES = 8 * 8 * _CHUNK
"""The memory that a comparison takes in addition to the compared tensors: eight chunks in float64."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing compiled code with eager code.

    The reason is the difference, or tells in detail what was not compared.
    """

    verdict: Result
    reason: str | None = None
    max_abs_error: float | None = None  # the largest absolute error of any output element
    is_wrong: bool = False  # whether a difference is too large for an imprecise result, so that nobody may get it
    may_be_rounding: bool = False  # whether a difference is small enough for rounding errors of another order
    why_not: WhyNot | None = None  # why nothing was compared
    tensors: int = 0  # the number of tensors
    noisy: int = 0  # how many of them were not compared, because rounding alone decides their values


def not_compared(why_not: WhyNot, details: str = "") -> Comparison:
    """Return the result if nothing was compared."""
    return Comparison("not compared", f"{why_not}: {details}" if details else why_not, why_not=why_not)


@dataclass
class Results:
    """The results of one run, by name. Eager's gradients are in CPU memory, because two sets take too much of a GPU."""

    tensors: dict[str, torch.Tensor]  # outputs and mutated inputs
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter((self.tensors | self.gradients).items())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name] if name in self.tensors else self.gradients[name]


class _Limit(NamedTuple):
    """The relative error that a tensor may have. Below the magnitude ``floor``, it contains others' rounding errors.

    The error of a gradient whose terms all cancel out may be ``zero``. Magnitudes are root mean squares.
    """

    tolerance: float
    floor: float
    zero: float = 0.0


def compare_results(
    expected: Results, actual: Results, allowed: float, run_in_double: Callable[[], Results]
) -> Comparison:
    """Compare the results of a compiled run with the results of an eager run.

    A difference beyond the tolerance counts only if the compiled result is also further from a float64 run than the
    eager result. torch's own accuracy checks use the same rule. The rule is necessary for sums that cancel out, such as
    the gradient of a bias before a batch norm, where both runs compute only rounding errors.
    """
    if reason := _other_form(expected.tensors, actual.tensors):
        return Comparison("differs", reason, math.inf, is_wrong=True)
    measures = {name: _measure(tensor, actual[name]) for name, tensor in expected}
    limits = _limits(expected, measures, allowed)
    count, largest = len(measures), max((measures[name].largest for name in expected.tensors), default=0.0)
    errors = {name: measure.error / max(measure.rms, limits[name].floor, 1e-30) for name, measure in measures.items()}
    suspects = [name for name, error in errors.items() if error > limits[name].tolerance]
    problem, verdicts = "", dict[str, tuple[Literal["equal", "differs", "noisy"], float]]()
    if suspects:
        try:
            reference = run_in_double()
            in_double = {
                name: _in_double(expected[name], actual[name], reference[name], limits[name]) for name in suspects
            }
            for group in (expected.tensors, expected.gradients):
                of_group = {name: errors for name, errors in in_double.items() if name in group}
                usual = statistics.median([errors.eager for errors in of_group.values()] or [0.0])
                verdicts |= {name: errors.verdict(limits[name], usual) for name, errors in of_group.items()}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            problem = f"no float64 reference: {describe_failure(error)}"
            clear = {name: _CLEAR_FACTOR * max(limits[name].tolerance, allowed) for name in suspects}
            verdicts = {name: ("differs", errors[name]) for name in suspects if errors[name] > clear[name]}
            if not verdicts:
                return Comparison("not compared", problem, why_not="no float64 reference")
    noisy = {name: error for name, (verdict, error) in verdicts.items() if verdict == "noisy"}
    found = {name: error for name, (verdict, error) in verdicts.items() if verdict == "differs"}
    if not found:
        noisiest = max(noisy, key=noisy.__getitem__, default="")
        reason = f"rounding alone moves {noisiest} by {noisy[noisiest]:.0%}" if noisy else None
        if len(noisy) == count:
            return Comparison("not compared", reason, why_not="rounding")
        return Comparison("equal", reason, largest, tensors=count, noisy=len(noisy))
    # Wrong outputs cause wrong gradients, so name an output if one is wrong.
    name = max([name for name in found if name in expected.tensors] or found, key=found.__getitem__)
    if _is_exact(expected[name]):
        reason = f"{name} differs in {found[name] ** 2:.2%} of its elements"
    else:
        reason = f"{name} has a relative error of {found[name]:.2g} (tolerance {limits[name].tolerance:.2g})"
    rounds = found[name] <= _CLEAR_FACTOR * limits[name].tolerance
    is_wrong = max(found.values()) > _WRONG
    reason = f"{reason}; {problem}" if problem else reason
    return Comparison("differs", reason, largest, is_wrong, rounds, tensors=count, noisy=len(noisy))


def tolerance(tensors: Iterable[torch.Tensor], dtypes: Iterable[torch.dtype] = ()) -> float:
    """Return the relative error that needs no float64 run.

    In float32, this is an error in the second half of the digits: 3.5e-4, the square root of the epsilon. In lower
    precision, it is four epsilons: 0.004 in float16 and TF32, 0.03 in bfloat16. The last digits differ, because
    compiled code sums in another order and keeps more intermediate results in float32.
    """
    tensors = list(tensors)
    known = {tensor.dtype for tensor in tensors} | set(dtypes)
    cuda = any(tensor.is_cuda for tensor in tensors)
    device = "cuda" if cuda else "cpu"
    if torch.is_autocast_enabled(device):
        known.add(torch.get_autocast_dtype(device))
    coarsest = max((torch.finfo(dtype).eps for dtype in known if dtype.is_floating_point), default=0.0)
    allows_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    if cuda and torch.float32 in known and allows_tf32:
        coarsest = max(coarsest, _TF32_EPS)
    of_float32 = math.sqrt(torch.finfo(torch.float32).eps)
    return min(math.sqrt(coarsest), max(_EPSILONS * coarsest, of_float32))


def gradients_of(
    tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of leaves for random gradients of the outputs, which are the same in each run."""
    outputs, cotangents = [], []
    for seed, (name, tensor) in enumerate(tensors.items()):
        if leaves and tensor.requires_grad:
            outputs.append(tensor)
            # Random, because ones have no gradient through a softmax. The float64 run gets the same rounded values.
            generator = torch.Generator(tensor.device).manual_seed(seed)
            random = torch.randn(tensor.shape, device=tensor.device, generator=generator)
            cotangents.append(random.to(dtypes[name]).to(tensor.dtype))
    if not outputs:
        return {}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    return {
        name: leaf.detach().new_zeros(()).expand_as(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


class _Measure(NamedTuple):
    """The largest absolute error, and the root mean squares of the errors and of the eager tensor."""

    largest: float
    error: float
    rms: float


def _limits(expected: Results, measures: Mapping[str, _Measure], allowed: float) -> dict[str, _Limit]:
    roots = {name: math.sqrt(max(1, tensor.numel())) for name, tensor in expected}
    floor = allowed * min(1.0, max((measures[name].rms for name in expected.tensors), default=0.0))
    norm = max((measures[name].rms * roots[name] for name in expected.gradients), default=0.0)
    limits = {name: _Limit(0.0 if _is_exact(t) else allowed, floor) for name, t in expected.tensors.items()}
    of_gradients = max(allowed, min(math.sqrt(allowed), _MAX_GRADIENT_TOLERANCE))
    return limits | {
        name: _Limit(of_gradients, allowed * norm / roots[name], _ZERO_ERROR * norm / roots[name])
        for name in expected.gradients
    }


def _measure(expected: torch.Tensor, actual: torch.Tensor) -> _Measure:
    """Measure the errors of a tensor. NaN equals NaN, and infinity equals infinity. An integer is right or wrong."""
    sums = torch.zeros(3, dtype=torch.float64, device=actual.device)
    for e, a in _chunks(expected, actual):
        error = torch.where((e == a) | (e.isnan() & a.isnan()), 0.0, (a - e).abs()).nan_to_num(math.inf, math.inf)
        counted = error.bool().double() if _is_exact(expected) else error
        sums[0] = torch.maximum(sums[0], error.max())
        sums[1:] += torch.stack([counted.square().sum(), torch.where(e.isfinite(), e, 0.0).square().sum()])
    largest, *squares = sums.tolist()
    rms_error, rms = (math.sqrt(square / max(1, expected.numel())) for square in squares)
    return _Measure(largest, rms_error, 1.0 if _is_exact(expected) else rms)


class _Errors(NamedTuple):
    """The errors of a compiled and an eager tensor against float64: root mean squares, and shares of far elements."""

    elements: int
    compiled: float
    eager: float
    far: float
    eager_far: float
    zero: bool  # whether the tensor consists of rounding errors only

    def verdict(self, limit: _Limit, usual: float) -> tuple[Literal["equal", "differs", "noisy"], float]:
        """Judge the compiled tensor. Return its error, or the error of a noisy eager tensor.

        ``usual`` is the median error of eager's tensors, because rounding may hit one of them less by chance.
        """
        if self.compiled <= limit.tolerance or self.zero:
            return "equal", self.compiled
        # The error of few elements says little about the usual error: one element may be right by chance.
        by_rounding = _EAGER_FACTOR * (1 + 10 / self.elements) * max(self.eager, min(usual, _NOISE))
        if self.compiled > by_rounding:
            return "differs", self.compiled
        if self.eager > _NOISE:
            return "noisy", self.eager
        few = _FEW + _EAGER_FACTOR * self.eager_far + 10 / self.elements
        return ("differs" if self.far > few else "equal"), self.compiled


def _in_double(expected: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor, limit: _Limit) -> _Errors:
    """Compare two tensors with the float64 result."""
    exact, count = _is_exact(expected), max(1, expected.numel())
    magnitude = 1.0 if exact else _measure(reference, reference).rms
    scale = max(magnitude, limit.floor, 1e-30)
    sums = torch.zeros(4, dtype=torch.float64, device=actual.device)
    for e, a, r in _chunks(expected, actual, reference):
        known = e.isfinite() & r.isfinite()
        for i, result in enumerate((a, e)):
            error = torch.where(known, (result - r).abs(), 0.0).nan_to_num(math.inf, math.inf)
            error = error.bool().double() if exact else error / scale
            sums[i] += error.square().sum()
            sums[2 + i] += 0.0 if exact else (error > _FAR * (r.abs() / scale + 1)).sum()
    square, eager_square, far, eager_far = (sums / count).tolist()
    is_zero = magnitude <= _ZERO * limit.zero and math.sqrt(square) * scale <= limit.zero
    return _Errors(count, math.sqrt(square), math.sqrt(eager_square), far, eager_far, is_zero)


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield corresponding parts of tensors, in float64 on the device of the second one."""
    device = tensors[1].device
    parts = zip(*(_flat(tensor).split(_CHUNK) for tensor in tensors), strict=True)
    return (tuple(chunk.to(device).double() for chunk in of_all) for of_all in parts if of_all[0].numel())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.jagged:
        tensor = _without_holes(tensor).values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().flatten()


def _other_form(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> str | None:
    """Return how the shape, dtype or offsets of a compiled tensor differ."""
    for name, tensor in expected.items():
        compiled = actual.get(name)
        if compiled is None or _shape(compiled) != _shape(tensor) or compiled.dtype != tensor.dtype:
            return f"{name} is {_described(compiled)}, and {_described(tensor)} in eager execution"
        if tensor.layout is torch.jagged and not torch.equal(_offsets(compiled), _offsets(tensor)):
            return f"{name} has other offsets than in eager execution"
    return None


def _offsets(jagged: torch.Tensor) -> torch.Tensor:
    return _without_holes(jagged).offsets()  # type: ignore[attr-defined,no-any-return]


def _without_holes(jagged: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor whose values are all used. ``torch.nested.narrow`` returns a view with unused values."""
    jagged = jagged.detach()
    return jagged if jagged.lengths() is None else jagged.contiguous()  # type: ignore[attr-defined]


def _shape(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """Return the shape, with ``None`` for a jagged dimension, whose symbolic size is another one in each run."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)


def _described(tensor: torch.Tensor | None) -> str:
    return "no tensor" if tensor is None else f"of shape {_shape(tensor)} and {tensor.dtype}"
