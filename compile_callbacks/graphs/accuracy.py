"""Compares results of compiled code and eager code within rounding errors, for verification and exports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.profiling.events import Result, WhyNot

Tensors = Mapping[str, torch.Tensor]
_Limits = Mapping[str, tuple[float, float]]  # the tolerance, and the magnitude below which a value is rounding
GRADIENT = "the gradient of "  # the names of gradients start with this

_EPSILONS = 4  # a few roundings in a row; results that were rounded more often need the float64 run
_CLEAR_FACTOR = 10.0  # without a float64 run, only an error of ten tolerances counts
_SMALL = 1 / 64  # values that cross a ReLU's zero moved float32 gradients of ResNets by up to 8e-3
_EAGER_FACTOR = 3.0  # how many times the error of the eager result a compiled result may have
_EAGER_FACTOR_IF_SMALL = 30.0  # eager sums of float32 are more precise: 7 times for a running mean of a MobileNet
_NOISE = 0.25  # the error of an eager result that says nothing, because rounding alone decides its values
_FAR = 0.5  # an element is far off if its error is larger than this share of its magnitude plus the tensor's
_FEW = 2.0**-10  # the share of elements that may be far off, as if a comparison with zero flips
_WRONG = 0.5  # no rounding error of a tensor is half as large as the tensor itself
_ZERO = 1e-6  # relative to the rounding errors of the largest gradient: a smaller float64 value is zero
_CHUNK = 2**22  # elements to compare at once, which bounds the memory of a comparison
COMPARISON_BYTES = 8 * 8 * _CHUNK  # eight chunks in float64, in addition to the compared tensors


@dataclass(frozen=True)
class GraphComparison:
    """The result of comparing compiled code with eager code. The reason names the difference or a skipped tensor."""

    result: Result
    reason: str | None = None
    max_abs_error: float | None = None  # the largest absolute error of any output element
    is_wrong: bool = False  # whether a difference is too large for an imprecise result, so that nobody may get it
    why_not: WhyNot | None = None  # why nothing was compared
    tensors: int = 0  # the number of tensors
    noisy_tensors: int = 0  # how many of them were not compared, because rounding alone decides their values


def not_compared(why_not: WhyNot, details: str = "") -> GraphComparison:
    """Return the result if nothing was compared."""
    return GraphComparison("not compared", f"{why_not}: {details}" if details else why_not, why_not=why_not)


def compare_results(
    expected: Tensors, actual: Tensors, allowed: float, double_run: Callable[[], Tensors]
) -> GraphComparison:
    """Compare the outputs, mutated inputs and gradients of a compiled run with the ones of an eager run, by name.

    A difference beyond the tolerance counts only if the compiled result is also further from a float64 run than the
    eager one, as in torch's own accuracy checks. For sums that cancel out, such as the gradient of a bias before a
    batch norm, both runs compute only rounding errors.
    """
    expected, actual = _as_plain(expected), _as_plain(actual)
    for name, tensor in expected.items():
        if (other := actual.get(name)) is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            reason = f"{name} does not have the shape {tuple(tensor.shape)} and {tensor.dtype} of eager execution"
            return GraphComparison("differs", reason, math.inf, is_wrong=True)
    errors = {name: _errors(tensor, actual[name], tensor) for name, tensor in expected.items()}
    limits = _limits(errors, allowed)
    relative = {name: error.relative(limits[name][1]) for name, error in errors.items()}
    suspects = {name: error for name, error in relative.items() if error > limits[name][0]}
    try:
        truth = _as_plain(double_run()) if suspects else {}
        both = {name: [_errors(truth[name], x[name], expected[name]) for x in (actual, expected)] for name in suspects}
        verdicts, problem = _judge(both, limits), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        clear = {name: _CLEAR_FACTOR * max(limits[name][0], allowed) for name in suspects}
        verdicts = {name: ("differs", error) for name, error in suspects.items() if error > clear[name]}
        if not verdicts:
            return not_compared("no float64 reference", describe_failure(failure))
        problem = f"; no float64 reference: {describe_failure(failure)}"
    noisy = {name: error for name, (verdict, error) in verdicts.items() if verdict == "noisy"}
    found = {name: error for name, (verdict, error) in verdicts.items() if verdict == "differs"}
    noisiest = max(noisy, key=noisy.__getitem__, default="")
    noise = f"rounding alone moves {noisiest} by {noisy[noisiest]:.0%}" if noisy else None
    if len(noisy) == len(errors) > 0:
        return GraphComparison("not compared", noise, why_not="rounding")
    largest = max((error.largest for name, error in errors.items() if not name.startswith(GRADIENT)), default=0.0)
    if not found:
        return GraphComparison("equal", noise, largest, tensors=len(errors), noisy_tensors=len(noisy))
    # Wrong outputs cause wrong gradients, so name an output if one is wrong.
    name = max([name for name in found if not name.startswith(GRADIENT)] or found, key=found.__getitem__)
    what = f"has a relative error of {found[name]:.2g} (tolerance {limits[name][0]:.2g})"
    if errors[name].is_exact:
        what = f"differs in {found[name] ** 2:.2%} of its elements"
    reason, is_wrong = f"{name} {what}{problem}", max(found.values()) > _WRONG
    return GraphComparison("differs", reason, largest, is_wrong, tensors=len(errors), noisy_tensors=len(noisy))


def tolerance(dtypes: Iterable[torch.dtype], device: torch.device) -> float:
    """Return the relative error of computations with the given dtypes that needs no float64 run.

    In float32, this is an error in the second half of the digits: 3.5e-4, the square root of the epsilon. In lower
    precision, it is four epsilons: 0.004 in float16 and TF32, 0.03 in bfloat16. The last digits differ, because
    compiled code sums in another order and keeps more intermediate results in float32.
    """
    dtypes = {*dtypes, torch.get_autocast_dtype(device.type)} if torch.is_autocast_enabled(device.type) else {*dtypes}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    allows_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and torch.float32 in dtypes and allows_tf32:
        coarsest = max(coarsest, 2.0**-10)  # TF32 keeps ten bits of the mantissa
    return min(math.sqrt(coarsest), max(_EPSILONS * coarsest, math.sqrt(torch.finfo(torch.float32).eps)))


class _Errors(NamedTuple):
    """The largest error, the root mean squares of errors and reference, and the share of elements that are far off."""

    elements: int
    is_exact: bool  # whether the elements are integers
    largest: float
    rms: float
    magnitude: float
    far: float

    def relative(self, floor: float) -> float:
        return self.rms / max(self.magnitude, floor, 1e-30)


def _limits(errors: Mapping[str, _Errors], allowed: float) -> _Limits:
    """Return the tolerance of each tensor, and the magnitude of the rounding errors that other tensors explain."""
    gradients = [error for name, error in errors.items() if name.startswith(GRADIENT)]
    norm = max((error.magnitude * math.sqrt(error.elements) for error in gradients), default=0.0)
    magnitude = max((error.magnitude for name, error in errors.items() if not name.startswith(GRADIENT)), default=0.0)
    of_gradients = max(allowed, min(math.sqrt(allowed), _SMALL))
    return {
        name: (of_gradients, allowed * norm / math.sqrt(error.elements))
        if name.startswith(GRADIENT)
        else (0.0 if error.is_exact else allowed, allowed * min(1.0, magnitude))
        for name, error in errors.items()
    }


def _errors(reference: torch.Tensor, result: torch.Tensor, eager: torch.Tensor) -> _Errors:
    """Measure the errors of a result, in elements that are finite in eager and in the reference.

    An integer is right or wrong. An element is far off relative to its magnitude plus the usual one.
    """
    device = result.device if reference.device.type == "cpu" else reference.device
    is_exact, elements = not reference.is_floating_point(), max(1, result.numel())
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    tensors = [tensor.flatten().split(_CHUNK) for tensor in (reference, result, eager)]
    for chunks in zip(*tensors, strict=True) if result.numel() else ():
        # With hundreds of small tensors on a GPU, the time depends on the number of these operations.
        r, x = (chunk.to(device).double() for chunk in chunks[:2])
        is_finite = counts = r.isfinite()
        if eager is not reference:
            counts = is_finite & chunks[2].to(device).double().isfinite()
        error = torch.where(counts, (x - r).abs(), 0.0).nan_to_num(math.inf, math.inf)
        sums[0] = torch.maximum(sums[0], error.max())
        error = error.bool().double() if is_exact else error
        square = torch.where(is_finite, r, 0.0).square()
        far = error > _FAR * (r.abs() + square.mean().sqrt())
        sums[1:] += torch.stack([error.square().sum(), square.sum(), far.sum()])
    largest, *totals = sums.tolist()
    square_of_error, square_of_reference, far_off = (total / elements for total in totals)
    magnitude = 1.0 if is_exact else math.sqrt(square_of_reference)
    return _Errors(elements, is_exact, largest, math.sqrt(square_of_error), magnitude, far_off)


def _judge(both: Mapping[str, list[_Errors]], limits: _Limits) -> dict[str, tuple[str, float]]:
    """Evaluate the errors in a float64 run. A verdict has the compiled error, or the eager one of a noisy tensor."""
    verdicts = {}
    for name, (compiled, eager) in both.items():
        (allowed, floor), elements = limits[name], compiled.elements
        error, eager_error = compiled.relative(floor), eager.relative(floor)
        # Rounding may hit one eager tensor less than the others by chance. So compare also with the usual error.
        alike = [other for other in both if other.startswith(GRADIENT) == name.startswith(GRADIENT)]
        usual = min(_NOISE, statistics.median(both[other][1].relative(limits[other][1]) for other in alike))
        by_rounding = _EAGER_FACTOR * (1 + 10 / elements) * max(eager_error, usual)  # a few elements tell little
        few = _FEW + _EAGER_FACTOR * eager.far + 10 / elements
        limit = max(by_rounding, min(_EAGER_FACTOR_IF_SMALL * eager_error, _SMALL))
        if error <= allowed or (compiled.magnitude <= _ZERO * floor and compiled.rms <= floor / 4):
            verdicts[name] = "equal", error
        elif error > limit or (eager_error <= _NOISE and compiled.far > few):
            verdicts[name] = "differs", error
        else:
            verdicts[name] = ("noisy", eager_error) if eager_error > _NOISE else ("equal", error)
    return verdicts


def _as_plain(results: Tensors) -> dict[str, torch.Tensor]:
    """Return results as dense tensors of real numbers, a jagged tensor as its values and its offsets."""
    plain = dict[str, torch.Tensor]()
    for name, tensor in results.items():
        dense = tensor.detach()
        if tensor.layout is torch.jagged:
            dense = dense.contiguous()  # without the unused values of a view by torch.nested.narrow
            plain[f"{name}.offsets()"] = dense.offsets()  # type: ignore[attr-defined]
            dense = dense.values()
        elif tensor.layout is not torch.strided:
            dense = dense.to_dense()
        plain[name] = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return plain
