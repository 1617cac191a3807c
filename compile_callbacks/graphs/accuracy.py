"""Compares results of compiled code and eager code within rounding errors, for verification and exports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.profiling.events import Result, WhyNot

Tensors = Mapping[str, torch.Tensor]
_Verdict = tuple[Literal["equal", "differs", "noisy"], float]  # with the error of the compiled or the noisy tensor

GRADIENT = "the gradient of "  # the names of gradients start with this

_TF32_EPS = 2.0**-10  # TF32 keeps ten bits of the mantissa
_EPSILONS = 4  # a few roundings in a row; results that were rounded more often need the float64 run
_CLEAR_FACTOR = 10.0  # without a float64 run, only an error of ten tolerances counts
_SMALL = 1 / 64  # values that cross a ReLU's zero moved float32 gradients of ResNets by up to 8e-3
_EAGER_FACTOR = 3.0  # how many times the error of the eager result a compiled result may have
_EAGER_FACTOR_IF_SMALL = 30.0  # eager sums of float32 are more precise: 7 times for a running mean of a MobileNet
_NOISE = 0.25  # the error of an eager result that says nothing, because rounding alone decides its values
_FAR = 0.5  # an element is far off if its error is larger than this share of its magnitude plus the tensor's
_FEW = 2.0**-10  # the share of elements that may be far off, as if a comparison with zero flips
_WRONG = 0.5  # no rounding error of a tensor is half as large as the tensor itself
_ZERO_ERROR = 2.0**-14  # 512 epsilons of float32: the error that a zero gradient may have, relative to the largest norm
_ZERO = 1e-6  # relative to this error: a gradient that is smaller in float64 is zero
_CHUNK = 2**22  # elements to compare at once, which bounds the memory of a comparison
COMPARISON_BYTES = 8 * 8 * _CHUNK
"""The memory that a comparison takes in addition to the compared tensors: eight chunks in float64."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing compiled code with eager code. The reason names the difference or a skipped tensor."""

    verdict: Result
    reason: str | None = None
    max_abs_error: float | None = None  # the largest absolute error of any output element
    is_wrong: bool = False  # whether a difference is too large for an imprecise result, so that nobody may get it
    why_not: WhyNot | None = None  # why nothing was compared
    tensors: int = 0  # the number of tensors
    noisy_tensors: int = 0  # how many of them were not compared, because rounding alone decides their values


def not_compared(why_not: WhyNot, details: str = "") -> Comparison:
    """Return the result if nothing was compared."""
    return Comparison("not compared", f"{why_not}: {details}" if details else why_not, why_not=why_not)


def compare_results(
    expected: Tensors, actual: Tensors, allowed: float, run_in_double: Callable[[], Tensors]
) -> Comparison:
    """Compare the outputs, mutated inputs and gradients of a compiled run with the ones of an eager run, by name.

    A difference beyond the tolerance counts only if the compiled result is also further from a float64 run than the
    eager result. torch's own accuracy checks use the same rule. The rule is necessary for sums that cancel out, such as
    the gradient of a bias before a batch norm, where both runs compute only rounding errors.
    """
    if reason := _other_form(expected, actual):
        return Comparison("differs", reason, math.inf, is_wrong=True)
    errors = {name: _errors(tensor, actual[name]) for name, tensor in expected.items()}
    limits = _limits(expected, errors, allowed)
    largest = max((error.largest for name, error in errors.items() if not name.startswith(GRADIENT)), default=0.0)
    suspects = [name for name, error in errors.items() if error.relative(limits[name]) > limits[name].tolerance]
    problem, verdicts = "", dict[str, _Verdict]()
    if suspects:
        try:
            scales = {name: max(errors[name].magnitude, limits[name].floor) for name in suspects}
            verdicts = _judge(expected, actual, run_in_double(), scales, limits)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            problem = f"no float64 reference: {describe_failure(failure)}"
            clear = {name: _CLEAR_FACTOR * max(limits[name].tolerance, allowed) for name in suspects}
            relative = {name: errors[name].relative(limits[name]) for name in suspects}
            verdicts = {name: ("differs", relative[name]) for name in suspects if relative[name] > clear[name]}
            if not verdicts:
                return Comparison("not compared", problem, why_not="no float64 reference")
    noisy = {name: error for name, (verdict, error) in verdicts.items() if verdict == "noisy"}
    found = {name: error for name, (verdict, error) in verdicts.items() if verdict == "differs"}
    if not found:
        return _without_difference(noisy, len(errors), largest)
    # Wrong outputs cause wrong gradients, so name an output if one is wrong.
    name = max([name for name in found if not name.startswith(GRADIENT)] or found, key=found.__getitem__)
    reason = f"{name} has a relative error of {found[name]:.2g} (tolerance {limits[name].tolerance:.2g})"
    if _is_exact(expected[name]):
        reason = f"{name} differs in {found[name] ** 2:.2%} of its elements"
    reason = f"{reason}; {problem}" if problem else reason
    is_wrong = max(found.values()) > _WRONG
    return Comparison("differs", reason, largest, is_wrong, tensors=len(errors), noisy_tensors=len(noisy))


def _without_difference(noisy: Mapping[str, float], count: int, largest: float) -> Comparison:
    noisiest = max(noisy, key=noisy.__getitem__, default="")
    reason = f"rounding alone moves {noisiest} by {noisy[noisiest]:.0%}" if noisy else None
    if len(noisy) == count > 0:
        return Comparison("not compared", reason, why_not="rounding")
    return Comparison("equal", reason, largest, tensors=count, noisy_tensors=len(noisy))


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
    return min(math.sqrt(coarsest), max(_EPSILONS * coarsest, math.sqrt(torch.finfo(torch.float32).eps)))


class _Limit(NamedTuple):
    """The relative error that a tensor may have. Magnitudes below ``floor`` are rounding errors of other tensors."""

    tolerance: float
    floor: float
    zero: float = 0.0  # the error of a gradient whose terms all cancel out


class _Errors(NamedTuple):
    """The largest error, the root mean squares of errors and reference, and the share of elements that are far off."""

    largest: float
    rms: float
    magnitude: float
    far: float

    def relative(self, limit: _Limit) -> float:
        return self.rms / max(self.magnitude, limit.floor, 1e-30)


def _limits(expected: Tensors, errors: Mapping[str, _Errors], allowed: float) -> dict[str, _Limit]:
    roots = {name: math.sqrt(max(1, tensor.numel())) for name, tensor in expected.items()}
    norm = max((errors[name].magnitude * roots[name] for name in expected if name.startswith(GRADIENT)), default=0.0)
    magnitude = max((error.magnitude for name, error in errors.items() if not name.startswith(GRADIENT)), default=0.0)
    of_gradients = max(allowed, min(math.sqrt(allowed), _SMALL))
    return {
        name: _Limit(of_gradients, allowed * norm / root, _ZERO_ERROR * norm / root)
        if name.startswith(GRADIENT)
        else _Limit(0.0 if _is_exact(expected[name]) else allowed, allowed * min(1.0, magnitude))
        for name, root in roots.items()
    }


def _errors(
    reference: torch.Tensor, result: torch.Tensor, *, eager: torch.Tensor | None = None, scale: float = math.inf
) -> _Errors:
    """Measure the errors of a result. NaN equals NaN, infinity equals infinity, and an integer is right or wrong.

    Elements that are not finite in ``eager`` or the reference do not count. Errors are far off relative to ``scale``.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=result.device)
    tensors = [_flat(tensor).split(_CHUNK) for tensor in (reference, result, reference if eager is None else eager)]
    for chunks in zip(*tensors, strict=True) if result.numel() else ():
        r, x, e = (chunk.to(result.device).double() for chunk in chunks)
        right = (r == x) | (r.isnan() & x.isnan())
        right |= ~(e.isfinite() & r.isfinite()) if eager is not None else False
        error = torch.where(right, 0.0, (x - r).abs()).nan_to_num(math.inf, math.inf)
        sums[0] = torch.maximum(sums[0], error.max())
        error = error.bool().double() if _is_exact(reference) else error
        far = error > _FAR * (r.abs() + scale)
        sums[1:] += torch.stack([error.square().sum(), torch.where(r.isfinite(), r, 0.0).square().sum(), far.sum()])
    largest, *totals = sums.tolist()
    square, square_of_reference, far_off = (total / max(1, result.numel()) for total in totals)
    magnitude = 1.0 if _is_exact(reference) else math.sqrt(square_of_reference)
    return _Errors(largest, math.sqrt(square), magnitude, far_off)


def _judge(
    expected: Tensors, actual: Tensors, reference: Tensors, scales: Mapping[str, float], limits: Mapping[str, _Limit]
) -> dict[str, _Verdict]:
    """Evaluate compiled tensors by a float64 run, with their relative error, or with that of a noisy eager tensor."""
    both = {}
    for name, scale in scales.items():
        e, a, r = expected[name], actual[name], reference[name]
        both[name] = [_errors(r.to(a.device), x.to(a.device), eager=e, scale=scale) for x in (a, e)]
    verdicts: dict[str, _Verdict] = {}
    for name, (compiled, eager) in both.items():
        limit, elements = limits[name], max(1, expected[name].numel())
        error, eager_error = compiled.relative(limit), eager.relative(limit)
        # Rounding may hit one eager tensor less than the others by chance. So compare also with the usual error.
        alike = [other for other in both if other.startswith(GRADIENT) == name.startswith(GRADIENT)]
        usual = min(_NOISE, statistics.median(both[other][1].relative(limits[other]) for other in alike))
        by_rounding = _EAGER_FACTOR * (1 + 10 / elements) * max(eager_error, usual)  # a few elements tell little
        is_zero = compiled.magnitude <= _ZERO * limit.zero and compiled.rms <= limit.zero
        if error <= limit.tolerance or is_zero:
            verdicts[name] = "equal", error
        elif error > max(by_rounding, min(_EAGER_FACTOR_IF_SMALL * eager_error, _SMALL)):
            verdicts[name] = "differs", error
        elif eager_error > _NOISE:
            verdicts[name] = "noisy", eager_error
        else:
            few = _FEW + _EAGER_FACTOR * eager.far + 10 / elements
            verdicts[name] = "differs" if compiled.far > few else "equal", error
    return verdicts


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.jagged:
        tensor = _without_holes(tensor).values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().flatten()


def _other_form(expected: Tensors, actual: Tensors) -> str | None:
    """Return how the shape, dtype or offsets of a compiled tensor differ."""
    for name, tensor in expected.items():
        forms = []
        for each in (actual.get(name), tensor):
            # The size of a jagged dimension is a symbol, and another one in each run.
            shape = () if each is None else tuple(size if isinstance(size, int) else None for size in each.shape)
            forms.append("no tensor" if each is None else f"of shape {shape} and {each.dtype}")
        if forms[0] != forms[1]:
            return f"{name} is {forms[0]}, and {forms[1]} in eager execution"
        if tensor.layout is torch.jagged:
            offsets = [_without_holes(each).offsets() for each in (actual[name], tensor)]  # type: ignore[attr-defined]
            if not torch.equal(*offsets):
                return f"{name} has other offsets than in eager execution"
    return None


def _without_holes(jagged: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor whose values are all used. ``torch.nested.narrow`` returns a view with unused values."""
    jagged = jagged.detach()
    return jagged if jagged.lengths() is None else jagged.contiguous()  # type: ignore[attr-defined]
