"""Compares results of compiled code and eager code within rounding errors, for verification and exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.profiling.events import Result, WhyNot

_TF32_EPS = 2.0**-10  # TF32 keeps ten bits of the mantissa
_CLEAR_FACTOR = 10.0  # only in a gradient with terms that cancel out can rounding cause an error of ten tolerances
_MAX_GRADIENT_TOLERANCE = 1 / 64  # values that cross a ReLU's zero moved float32 gradients of ResNets by up to 8e-3
_DIRECTION_FACTOR = 8  # the error that a gradient's direction may have, as a multiple of the error of its norm
_WRONG = 0.5  # no rounding error of a tensor is half as large as the tensor itself
_ZERO_ERROR = 2.0**-14  # 512 epsilons of float32: the error that a zero gradient may have, relative to the largest norm
_ZERO = 1e-6  # relative to this error: a gradient that is smaller in float64 is zero
_CHUNK = 2**22  # elements to compare at once, which bounds the memory of a comparison
COMPARISON_BYTES = 8 * 8 * _CHUNK
"""The memory that a comparison takes in addition to the compared tensors: eight chunks in float64."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing compiled code with eager code.

    The reason is the difference, or tells in detail why nothing was compared.
    """

    verdict: Result
    reason: str | None = None
    max_abs_error: float | None = None  # the largest absolute error of any output element
    is_wrong: bool = False  # whether a difference is too large for an imprecise result, so that nobody may get it
    may_be_rounding: bool = False  # whether a difference is small enough for rounding errors of another order
    why_not: WhyNot | None = None  # why nothing was compared


def not_compared(why_not: WhyNot, details: str = "") -> Comparison:
    """Return the result if nothing was compared."""
    return Comparison("not compared", f"{why_not}: {details}" if details else why_not, why_not=why_not)


@dataclass
class Results:
    """The results of one run, by name. Two complete sets of gradients would take too much memory."""

    tensors: dict[str, torch.Tensor]  # outputs and mutated inputs
    sketches: dict[str, list[float]] = field(default_factory=dict)  # the `sketches` of all gradients
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # the gradients that are compared in full


Rerun = Callable[[Literal["eager", "compiled", "float64"], Collection[str]], Results]
"""A function that repeats a run and keeps the named gradients, or repeats the eager run in float64."""


def compare_results(expected: Results, actual: Results, allowed: float, rerun: Rerun) -> Comparison:  # noqa: C901
    """Compare the results of a compiled run with the results of an eager run.

    A difference beyond the tolerance counts only if the compiled result is also further from a float64 run than the
    eager result. torch's own accuracy checks use the same rule. The rule is necessary for sums that cancel out, such as
    the gradient of a bias before a batch norm, where both runs compute only rounding errors.
    """
    for name, tensor in expected.tensors.items():
        compiled = actual.tensors.get(name)
        if compiled is None or _shape(compiled) != _shape(tensor) or compiled.dtype != tensor.dtype:
            reason = f"{name} is {_described(compiled)}, and {_described(tensor)} in eager execution"
            return Comparison("differs", reason, math.inf, is_wrong=True)
        if tensor.layout is torch.jagged and not torch.equal(_offsets(compiled), _offsets(tensor)):
            return Comparison("differs", f"{name} has other offsets than in eager execution", math.inf, is_wrong=True)
    floors = _floors(expected, allowed)
    errors, max_abs_error = dict[str, float](), 0.0
    for name, tensor in expected.tensors.items():
        largest, errors[name] = _errors(tensor, actual.tensors[name], floors[name])
        max_abs_error = max(max_abs_error, largest)
    sketches = expected.sketches
    errors |= {name: _sketch_error(sketches[name], actual.sketches[name], floors[name]) for name in sketches}
    allowed_of = dict.fromkeys(errors, allowed) | dict.fromkeys(expected.sketches, gradient_tolerance(allowed))
    suspects = [name for name, error in errors.items() if error > allowed_of[name]]
    if not suspects:
        return Comparison("equal", max_abs_error=max_abs_error)
    of_gradients = [name for name in suspects if name in expected.sketches]
    try:
        reference = rerun("float64", of_gradients)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Without a float64 reference, report only a large error of an output.
        problem = f"no float64 reference: {describe_failure(error)}"
        confirmed = {
            name: errors[name]
            for name in suspects
            if name not in of_gradients and errors[name] > _CLEAR_FACTOR * allowed_of[name]
        }
        if not confirmed:
            return Comparison("not compared", problem, why_not="no float64 reference")
    else:
        problem = ""
        if of_gradients:
            expected.tensors |= rerun("eager", of_gradients).gradients
            actual.tensors |= rerun("compiled", of_gradients).gradients
            reference.tensors |= reference.gradients
        confirmed = {}
        for name in suspects:
            tensors = expected.tensors[name], actual.tensors[name], reference.tensors[name]
            floor, zero_error = floors[name], 0.0
            if name in of_gradients:
                root = math.sqrt(max(1, tensors[0].numel()))
                floor, zero_error = floor / root, _ZERO_ERROR * _largest_norm(expected) / root
            confirmed_error = _confirmed_error(
                *tensors, floor=floor, zero_error=zero_error, allowed=allowed_of[name], lenient=allowed < 1e-3
            )
            if confirmed_error is not None:
                confirmed[name] = confirmed_error
        if not confirmed:
            return Comparison("equal", max_abs_error=max_abs_error)
    # Wrong outputs cause wrong gradients, so name an output if one is wrong.
    name = max([name for name in confirmed if name not in of_gradients] or confirmed, key=confirmed.__getitem__)
    reason = f"{name} has a relative error of {confirmed[name]:.2g} (tolerance {allowed_of[name]:.2g})"
    reason = f"{reason}; {problem}" if problem else reason
    rounding = confirmed[name] <= _CLEAR_FACTOR * allowed_of[name]
    is_wrong = max(confirmed.values()) > _WRONG
    return Comparison("differs", reason, max_abs_error, is_wrong=is_wrong, may_be_rounding=rounding)


def tolerance(tensors: Iterable[torch.Tensor], dtypes: Iterable[torch.dtype] = ()) -> float:
    """Return the relative error that rounding may cause: the square root of the largest epsilon.

    The tolerance accepts an error in the second half of the digits: 3.5e-4 in float32, 0.03 in float16 and TF32, and
    0.09 in bfloat16. The last digits differ, because compiled code sums in another order and keeps more intermediate
    results in float32.
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
    return math.sqrt(coarsest)


def gradient_tolerance(allowed: float) -> float:
    """Return the relative error that rounding may cause in a gradient, a quarter of the digits and at most 1/64.

    If the `tolerance` of the outputs is larger, gradients have the same tolerance as outputs.
    """
    return max(allowed, min(math.sqrt(allowed), _MAX_GRADIENT_TOLERANCE))


def _random_tensor(shape: Sequence[int], device: torch.device, seed: int) -> torch.Tensor:
    """Return normally distributed numbers that depend only on the seed. This does not use the user's generators."""
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def gradients_of(
    tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of leaves for random gradients of the outputs, which are the same in each run."""
    outputs, cotangents = [], []
    for seed, (name, tensor) in enumerate(tensors.items()):
        if leaves and tensor.requires_grad:
            outputs.append(tensor)
            # Random, because ones have no gradient through a softmax. The float64 run gets the same rounded values.
            random = _random_tensor(tensor.shape, tensor.device, seed).to(like[name].dtype)
            cotangents.append(random.to(tensor.dtype))
    if not outputs:
        return {}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


def sketches(gradients: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the norm of each gradient, and its products with two random tensors, which depend on its direction."""
    made: dict[str, list[float]] = {}
    size = min(_CHUNK, max((gradient.numel() for gradient in gradients.values()), default=0))
    directions: dict[torch.device, torch.Tensor] = {}
    for name, gradient in gradients.items():
        device, dtype = gradient.device, torch.promote_types(gradient.dtype, torch.float32).to_real()
        if device not in directions:
            directions[device] = _random_tensor((2, 2 * size), device, seed=0)  # a complex number has two parts
        total = torch.zeros(3, dtype=torch.float64, device=device)
        for chunk in _flat(gradient).to(dtype).split(_CHUNK):
            products = directions[device][:, : len(chunk)].to(dtype) @ chunk
            total += torch.cat([torch.linalg.vector_norm(chunk).square()[None], products])
        square, *products_in_all = total.tolist()
        made[name] = [math.sqrt(square), *products_in_all]
    return made


def _sketch_error(expected: Sequence[float], actual: Sequence[float], floor: float) -> float:
    """Return the relative error of the norm or of the direction, whichever is larger."""
    if not math.isfinite(expected[0]):
        return 0.0  # the eager gradient is not finite, so nothing can be compared
    if not math.isfinite(actual[0]):
        return math.inf
    of_norm, *of_products = (abs(a - e) / max(expected[0], floor, 1e-30) for e, a in zip(expected, actual, strict=True))
    return max(of_norm, math.hypot(*of_products) / math.sqrt(2) / _DIRECTION_FACTOR)


def _floors(expected: Results, allowed: float) -> dict[str, float]:
    """Return the magnitude, by name, below which a tensor mostly contains rounding errors of larger tensors.

    The magnitude is a root mean square for tensors, and a norm for gradients.
    """
    magnitudes = [_rms(tensor) for tensor in expected.tensors.values()]
    of_tensors = dict.fromkeys(expected.tensors, allowed * min(1.0, max(magnitudes, default=0.0)))
    return of_tensors | dict.fromkeys(expected.sketches, allowed * _largest_norm(expected))


def _largest_norm(results: Results) -> float:
    """Return the largest norm of a gradient."""
    return max((norm for norm, *_ in results.sketches.values() if math.isfinite(norm)), default=0.0)


def _errors(expected: torch.Tensor, actual: torch.Tensor, floor: float) -> tuple[float, float]:
    """Return the largest absolute error and the relative error. NaN equals NaN, and infinity equals infinity."""
    exact = not (expected.is_floating_point() or expected.is_complex())
    largest = total = norm = torch.zeros((), dtype=torch.float64, device=expected.device)
    for e, a in _chunks(expected, actual):
        error = torch.where((e == a) | (e.isnan() & a.isnan()), 0.0, (a - e).abs()).nan_to_num(math.inf, math.inf)
        largest = torch.maximum(largest, error.max())
        total = total + (error.bool().sum() if exact else error.square().sum())
        norm = norm + torch.where(e.isfinite(), e, 0.0).square().sum()
    if exact:
        return float(largest), float(total) / max(1, expected.numel())
    scale = max(float(norm.sqrt()), floor * math.sqrt(expected.numel()), 1e-30)
    return float(largest), float(total.sqrt()) / scale


def _confirmed_error(
    expected: torch.Tensor,
    actual: torch.Tensor,
    reference: torch.Tensor,
    *,
    floor: float,
    zero_error: float,
    allowed: float,
    lenient: bool,
) -> float | None:
    """Return the relative error of a compiled tensor if it is less accurate than the eager tensor, else ``None``.

    If all terms of a gradient cancel out, only rounding errors remain. Their root mean square may be ``zero_error``.
    """
    e, a, r = (_flat(tensor).to(reference.device, torch.float64) for tensor in (expected, actual, reference))
    if not (expected.is_floating_point() or expected.is_complex()):
        # Integers may differ by rounding, too: the index of the largest value changes if two values are nearly equal.
        wrong, usual = float((a != r).double().mean()), float((e != r).double().mean())
        return wrong if wrong > 3 * usual + 1 / 8 else None
    finite = e.isfinite() & r.isfinite()
    e, a, r = e[finite], a[finite], r[finite]
    scale = max(_rms(r), floor, 1e-30)
    if not bool(a.isfinite().all()):
        return math.inf
    if _rms(a - r) / scale <= allowed:
        return None
    if _rms(r) <= _ZERO * zero_error and _rms(a - r) <= zero_error:
        return None
    if _torch.graphs.is_as_accurate(e / scale, a / scale, r / scale, tolerance=allowed, lenient=lenient):
        return None
    return _rms(a - e) / scale


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield corresponding parts of tensors, in float64."""
    parts = zip(*(_flat(tensor).split(_CHUNK) for tensor in tensors), strict=True)
    return (tuple(chunk.double() for chunk in of_all) for of_all in parts if of_all[0].numel())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.jagged:
        tensor = _without_holes(tensor).values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.flatten()


def _rms(tensor: torch.Tensor) -> float:
    squares = [float(torch.where(chunk.isfinite(), chunk, 0.0).square().sum()) for (chunk,) in _chunks(tensor)]
    return math.sqrt(math.fsum(squares) / max(1, tensor.numel()))


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
