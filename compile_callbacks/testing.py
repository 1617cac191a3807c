"""`assert_same_training`: trains a module with a callback and without it, and compares the runs, for your own tests."""

from __future__ import annotations

import copy
import hashlib
import importlib
import math
import pickle
import random
import tempfile
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from typing_extensions import override

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type
from compile_callbacks.callbacks.inductor_compile import InductorCompile
from compile_callbacks.report.loggers import lightning_package

# One value that crosses zero before a ReLU changes many digits of a gradient. A weight may begin as zero, and is then a
# sum of gradients.
_GRADIENT_TOLERANCE = 1 / 64
_NOISE_FACTOR = 10
_TINY = 1e-7  # the error of a smaller element is relative to this
_LIGHTNING_ATTRIBUTES = frozenset(vars(LightningModule()))
_DISABLED = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
_DTYPES = (("bf16", torch.bfloat16), ("16", torch.float16), ("", torch.float32))

_Values = dict[tuple[int, str], Any]  # by step and name


def assert_same_training(
    make_module: Callable[[], LightningModule],
    make_dataloader: Callable[[], Any],
    *,
    steps: int = 20,
    callback: Callback | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    allow_cannot_tell: bool = False,
) -> Literal["same", "cannot tell"]:
    """Train a module without a callback and with it, from the same seeds, and compare the two runs after each step.

    The function compares losses, validation outputs, gradients, weights, buffers, optimizer state, logged metrics,
    Python attributes of the modules (numbers, strings, collections of them and ``random.Random``) and the global random
    generators. It keeps the values of each step in CPU memory. Compiled code draws eager's random numbers
    (``fallback_random``).

    If a value differs by more than the tolerance, the function trains once more without the callback, with noise in the
    last bit of each weight. A difference of the size of this noise's effect is rounding. The result is
    ``"cannot tell"`` if losses, outputs or metrics differ, but only after the noise has moved them, or all gradients
    together, by more than the tolerance.

    Args:
        make_module: Makes the LightningModule, once for each run.
        make_dataloader: Makes the training data, or a LightningDataModule, whose validation then runs too.
        steps: Number of optimizer steps, or -1 for all epochs of the Trainer.
        callback: The callback to check. ``None`` is ``InductorCompile(baseline_steps=0)``, which compiles all steps. A
            callback of yours runs with its own settings.
        trainer_kwargs: Arguments of the Trainer, for a single process. Each run gets a copy of the callbacks.
        tolerance: The norm of a difference, relative to the norm of the eager value, that counts as equal. By default
            1e-3, or four times the machine epsilon of the Trainer's precision. At least 1/64 for gradients, and for
            weights and optimizer state, which consist of gradients.
        allow_cannot_tell: Whether to return ``"cannot tell"`` instead of raising.

    A metric or an attribute that differs between two eager runs, such as a logged time, is not compared. A warning
    names it.

    Raises:
        TypeError: If ``steps`` or ``tolerance`` is no number.
        ValueError: If ``steps`` is neither positive nor -1, or ``tolerance`` is negative, 1 or larger.
        AssertionError: If the runs differ, with the first step, the value and the relative error; if the function
            cannot tell; or if torch compiled nothing.
    """
    check_type("steps", steps, int, "a number of optimizer steps")
    check_type("tolerance", tolerance, (int, float, type(None)), "a relative error, or None")
    if steps == 0 or steps < -1:
        raise ValueError(with_code("CC205", f"{steps=} must be at least 1, or -1 for all epochs"))
    if not 0 <= (tolerance or 0) < 1:  # a NaN would call everything equal
        raise ValueError(with_code("CC205", f"{tolerance=} must be at least 0 and below 1"))
    arguments = (make_module, make_dataloader), {"max_steps": steps, **(trainer_kwargs or {})}
    eager = _Run().train(*arguments)
    torch.compiler.reset()  # torch counts recompiles for each function, also those of other tests
    seen = set[int]()
    list(_torch.events.compilation_records(seen))  # of earlier compiles
    with _torch.inductor.settings().patch(fallback_random=True):
        ours = _Run().train(*arguments, callback or InductorCompile(baseline_steps=0))
    if not list(_torch.events.compilation_records(seen)):
        raise AssertionError("torch compiled nothing, so the runs do not show whether compiled training is eager's")
    limit = max(1e-3, 4 * eager.epsilon) if tolerance is None else tolerance
    limits = dict.fromkeys(("gradient", "optimizer", "weight"), max(limit, _GRADIENT_TOLERANCE))
    keys = sorted(eager.values | ours.values, key=lambda key: key[0])
    errors = {key: _error(ours.values.get(key), eager.values.get(key)) for key in keys}
    errors = {key: error for key, error in errors.items() if error > limits.get(key[1].partition(" ")[0], limit)}
    if not errors or not (errors := _comparable(errors, eager, _Run().train(*arguments), limit)):
        return "same"
    noisy = _Run(noise=True).train(*arguments)
    # Compiled code rounds each operation differently, so it may be a step ahead of noise in the first weights.
    chaotic = min(
        (s for s in dict(keys) if _gradient_error(noisy, eager, s + 1) > limits["gradient"]), default=math.inf
    )
    noise: dict[str, float] = defaultdict(float)
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for step, name in keys:
        noise[name] = max(noise[name], _error(noisy.values.get((step, name)), eager.values.get((step, name))))
        error = errors.get((step, name), 0.0)
        if not error or (noise[name] <= limit and error <= _NOISE_FACTOR * noise[name]):
            continue  # the error is rounding
        if noise[name] <= limit and (step < chaotic or math.isinf(error)):
            found["different"].append((step, name))
        elif name.startswith(("loss", "output", "metric")):
            found["cannot tell"].append((step, name))
    if not found["different"] and (allow_cannot_tell or not found["cannot tell"]):
        return "cannot tell" if found["cannot tell"] else "same"
    verdict = "different" if found["different"] else "cannot tell"
    first = [key for key in found[verdict] if key[0] == found[verdict][0][0]]
    (step, name), *further = sorted(first, key=lambda key: -errors[key])
    also = f"; also {', '.join(value for _, value in further[:3])}" if further else ""
    raise AssertionError(
        f"{verdict}: in step {step}, {name} has a relative error of {errors[step, name]:.2g}: "
        f"{_shown(ours.values, step, name)}, eager {_shown(eager.values, step, name)}, "
        f"which noise in the last bit of each weight moves by {noise[name]:.2g}{also}"
    )


def _comparable(errors: dict[tuple[int, str], float], eager: _Run, again: _Run, limit: float) -> Any:
    """Return the errors without those of metrics and attributes that differ between two eager runs."""
    changing = {key[1] for key in errors if _error(again.values.get(key), eager.values.get(key)) > limit}
    if not_comparable := sorted(name for name in changing if name.startswith(("metric ", "attribute "))):
        names = ", ".join(not_comparable)
        warnings.warn(f"not compared, because they differ between two eager runs: {names}", stacklevel=3)
    return {key: error for key, error in errors.items() if key[1] not in not_comparable}


def _gradient_error(run: _Run, eager: _Run, step: int) -> float:
    """Return the relative error of all gradients of a step together."""
    runs, keys = (run.values, eager.values), [key for key in eager.values if key[1].startswith("gradient")]
    keys = [key for key in keys if key[0] == step and all(isinstance(x.get(key), torch.Tensor) for x in runs)]
    return _error(*(torch.cat([_double(x[key]).flatten() for key in keys]) for x in runs)) if keys else 0.0


def _double(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float64))  # complex128 if complex
    return result


def _shown(values: _Values, step: int, name: str) -> str:
    value = values.get((step, name), "nothing")
    return f"a norm of {float(_double(value).norm()):.6g}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def _error(value: Any, eager: Any) -> float:
    """Return the relative error of a value, which is infinite for a plain value that differs."""
    if isinstance(value, float) and isinstance(eager, float):
        value, eager = (torch.tensor(number, dtype=torch.float64) for number in (value, eager))
    if not (isinstance(value, torch.Tensor) and isinstance(eager, torch.Tensor)):
        return 0.0 if type(value) is type(eager) and value == eager else math.inf
    if (value.shape, value.dtype) != (eager.shape, eager.dtype):
        return math.inf
    equal = (value == eager) | ((value != value) & (eager != eager))  # or NaN
    if not (eager.is_floating_point() or eager.is_complex()):
        return 0.0 if equal.all() else math.inf
    difference = _double(torch.where(equal, 0, value - eager)).norm()
    error = float(difference / (_double(eager.nan_to_num()).norm() + _TINY * math.sqrt(eager.numel())))
    return math.inf if math.isnan(error) else error


class _Run(Callback):
    """Trains once, and keeps the values of each step by their names."""

    def __init__(self, *, noise: bool = False) -> None:
        self.values: _Values = {}
        self.epsilon = 0.0
        self._noise, self._step = noise, 1

    def train(
        self, makers: tuple[Callable[[], Any], Callable[[], Any]], kwargs: Mapping[str, Any], *callbacks: Callback
    ) -> _Run:
        with isolate_rng(), tempfile.TemporaryDirectory() as folder:
            _seed(0)
            module, data = (make() for make in makers)
            users = copy.deepcopy(kwargs.get("callbacks")) or []
            settings = {
                **dict.fromkeys(_DISABLED, False),
                "default_root_dir": folder,
                **kwargs,
                "callbacks": [*(users if isinstance(users, list) else [users]), *callbacks, self],
            }
            package = importlib.import_module(lightning_package(module, "LightningModule"))
            trainer: Trainer = package.Trainer(**settings)
            self.epsilon = next(torch.finfo(dtype).eps for name, dtype in _DTYPES if name in str(trainer.precision))
            _seed(1)
            trainer.fit(module, data)
            self._record_state(trainer, module)  # as the run left it
        return self

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in pl_module.parameters() if self._noise else ():
            if weight.is_floating_point() and not nn.parameter.is_lazy(weight):
                signs = torch.randint(2, weight.shape, generator=generator) * 2 - 1
                weight.data.mul_(1 + self.epsilon * signs.to(weight))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self._record(f"gradient of {name}", weight.grad)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        self._record("loss", outputs)
        self._record_state(trainer, pl_module)
        self._step += 1

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any, **_: Any) -> None:
        self._record(f"output of validation batch {args[1:]}", outputs)

    def _record(self, name: str, value: Any) -> None:
        self.values |= {(self._step, name): leaf for name, leaf in _leaves(name.replace("_orig_mod.", ""), value)}

    def _record_state(self, trainer: Trainer, module: LightningModule) -> None:
        for kind, tensors in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in tensors:
                self._record(f"{kind} {name}", tensor)
        for number, optimizer in enumerate(trainer.optimizers):
            self._record(f"optimizer {number}", optimizer.state_dict())
        self._record("metric", dict(trainer.callback_metrics))
        for path, submodule in module.named_modules():
            if "_orig_mod" not in submodule._modules:  # an attribute of `torch.compile(module)`
                attributes = {
                    name: value for name, value in vars(submodule).items() if name not in _LIGHTNING_ATTRIBUTES
                }
                self._record(f"attribute of {path or 'the module'}", attributes)
        states = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state().tolist()}
        if torch.cuda.is_initialized():
            states["cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
        for name, state in states.items():
            self._record(f"random generator {name}", hashlib.sha256(pickle.dumps(state)).hexdigest())


def _seed(seed: int) -> None:
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values within a value, with their names."""
    value = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    if isinstance(value, torch.Tensor):
        yield name, (value.detach().to_dense() if value.is_sparse else value.detach()).to("cpu", copy=True)
    elif isinstance(value, random.Random):
        yield name, hash(value.getstate())
    elif isinstance(value, (int, float, str, bytes, type(None))):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name} {key}", item)
