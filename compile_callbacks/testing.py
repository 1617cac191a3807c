"""`assert_same_training`: trains a module with a callback and without it, and compares the runs, for your own tests."""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from typing_extensions import override

from compile_callbacks import _torch
from compile_callbacks.callbacks.inductor_compile import InductorCompile

_GRADIENT_TOLERANCE = 1 / 64  # because one value that crosses zero before a ReLU changes many digits
_NOISE_FACTOR = 10
_TINY = 1e-7  # the size of an element, next to which a difference is relative to this size
_OF_LIGHTNING = frozenset(vars(LightningModule()))

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

    The function compares losses, validation outputs, gradients, weights, buffers, optimizer state, logged metrics, the
    order of Lightning's hooks, Python attributes of the modules (numbers, strings, collections of them, random
    generators) and the global random generators. It keeps a copy of all of them for each step in CPU memory.

    If a value differs by more than the tolerance, the function trains a third time, without the callback and with noise
    in the last bit of each weight. A difference of the size of the noise's effect counts as rounding. If the noise
    moves losses, outputs or metrics by more than the tolerance, the result is ``"cannot tell"``.

    Args:
        make_module: Makes the LightningModule. The function calls it once for each run.
        make_dataloader: Makes the training data, or a LightningDataModule, whose validation then runs too.
        steps: Number of optimizer steps.
        callback: The callback to check. ``None`` is ``InductorCompile(baseline_steps=0)``, which compiles all steps. A
            callback of yours runs with its own settings. Only with a baseline does `InductorCompile` detect Python's
            random numbers that a graph would freeze, so give ``InductorCompile(baseline_steps=3)`` for such code.
        trainer_kwargs: Arguments of the Trainer, for one process. Each run gets a copy of the callbacks.
        tolerance: The relative difference of two norms that counts as equal. By default 1e-3, or four times the machine
            epsilon of the Trainer's precision. At least 1/64 for gradients and optimizer state.
        allow_cannot_tell: Whether to return ``"cannot tell"`` instead of raising.

    Returns:
        ``"same"``, or ``"cannot tell"`` if you allow it.

    Raises:
        AssertionError: If the runs differ, with the first step, the value and the relative error; if the function
            cannot tell; or if torch compiled nothing. In all runs, compiled code draws eager's random numbers
            (``fallback_random``).
    """
    arguments = make_module, make_dataloader, {"max_steps": steps, **(trainer_kwargs or {})}
    eager = _Run().train(*arguments)
    torch.compiler.reset()  # torch counts recompiles for each function, also those of other tests
    with _torch.inductor.eager_random_numbers(), _torch.events.started_compiles() as started:
        ours = _Run().train(*arguments, callback or InductorCompile(baseline_steps=0))
    assert started, "torch compiled nothing, so the runs do not show whether compiled training is eager training"
    limit = tolerance if tolerance is not None else max(1e-3, 4 * eager.epsilon)
    errors = {key: error for key, error in _errors(ours.values, eager.values).items() if error > _limit(key, limit)}
    if not errors:
        return "same"
    noisy = _Run(noise=True).train(*arguments)
    noise: dict[str, float] = {}
    for key, moved in _errors(noisy.values, eager.values).items():
        noise[key[1]] = max(noise.get(key[1], 0.0), moved)
        if key in errors and errors[key] > _NOISE_FACTOR * noise[key[1]]:
            step, name = key
            values = ours.values.get(key, "absent"), eager.values.get(key, "absent")
            values_text = (
                "" if isinstance(values[1], torch.Tensor) else f" ({values[0]!r:.80}, eager {values[1]!r:.80})"
            )
            raise AssertionError(
                f"different: in step {step} {name}{values_text} has a relative error of {errors[key]:.2g}; allowed are "
                f"{_limit(key, limit):.2g}, and noise in the last bit moves eager by {noise[name]:.2g}"
            )
    unclear = [key for key in errors if key[1].startswith(("loss", "output", "metric"))]
    if not unclear:
        return "same"
    if allow_cannot_tell:
        return "cannot tell"
    step, name = unclear[0]
    raise AssertionError(
        f"cannot tell: from step {step} on, noise in the last bit moves {name} of eager training by {noise[name]:.2g}"
    )


def _limit(key: tuple[int, str], tolerance: float) -> float:
    return max(tolerance, _GRADIENT_TOLERANCE) if key[1].startswith(("gradient", "optimizer")) else tolerance


def _errors(run: _Values, eager: _Values) -> dict[tuple[int, str], float]:
    """Return the relative error of each value, in the order of the steps."""
    keys = sorted(eager | run, key=lambda key: key[0])
    return {key: _error(run.get(key, _ABSENT), eager.get(key, _ABSENT)) for key in keys}


_ABSENT = "absent"


def _error(value: Any, eager: Any) -> float:
    if isinstance(value, float) and isinstance(eager, float):
        value, eager = torch.tensor(value), torch.tensor(eager)
    if not (isinstance(value, torch.Tensor) and isinstance(eager, torch.Tensor)):
        return 0.0 if type(value) is type(eager) and value == eager else math.inf
    if (value.shape, value.dtype) != (eager.shape, eager.dtype):
        return math.inf
    if not eager.is_floating_point() and not eager.is_complex():
        return 0.0 if torch.equal(value, eager) else math.inf
    difference = torch.where((value == eager) | (value.isnan() & eager.isnan()), 0, value - eager)
    size = eager.nan_to_num().double().norm() + _TINY * math.sqrt(eager.numel())
    error = float(difference.double().norm() / size)
    return math.inf if math.isnan(error) else error


class _Run(Callback):
    """Trains once, and keeps the values of each step."""

    def __init__(self, *, noise: bool = False) -> None:
        self.values: _Values = {}
        self.epsilon = 0.0
        self._noise = noise
        self._step = 1
        self._hooks: list[str] = []

    def train(
        self,
        make_module: Callable[[], LightningModule],
        make_dataloader: Callable[[], Any],
        kwargs: Mapping[str, Any],
        *callbacks: Callback,
    ) -> _Run:
        with isolate_rng(), tempfile.TemporaryDirectory() as folder:
            seed_all(0)
            module, data = make_module(), make_dataloader()
            users = copy.deepcopy(kwargs.get("callbacks")) or []
            settings = {
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
                **kwargs,
                "callbacks": [*(users if isinstance(users, list) else [users]), *callbacks, self],
                "profiler": _HookOrder(self._hooks, tuple(f"[Callback]{c.state_key}." for c in callbacks)),
            }
            trainer = Trainer(**settings)
            precision = str(trainer.precision)
            dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
            self.epsilon = torch.finfo(dtype).eps
            seed_all(1)
            trainer.fit(module, data)
            self._keep_state(trainer, module)
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
            self._keep(f"gradient of {name}", weight.grad)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._keep("loss", outputs)
        self._keep_state(trainer, pl_module)
        self._step += 1

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._keep(f"output of validation batch {batch_idx} {args or ''}".rstrip(), outputs)

    def _keep(self, name: str, value: Any) -> None:
        self.values |= {(self._step, name): leaf for name, leaf in _leaves(name.replace("_orig_mod.", ""), value)}

    def _keep_state(self, trainer: Trainer, module: LightningModule) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._keep(name, tensor)
        for number, optimizer in enumerate(trainer.optimizers):
            self._keep(f"optimizer {number}", optimizer.state_dict())
        self._keep("metric", dict(trainer.callback_metrics))
        for path, part in module.named_modules():
            if "_orig_mod" not in part._modules:  # an attribute of `torch.compile(module)`
                own = {name: value for name, value in vars(part).items() if name not in _OF_LIGHTNING}
                self._keep(f"attribute of {path or 'the module'}", own)
        states = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state().numpy()}
        if torch.cuda.is_initialized():
            states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
        for name, state in states.items():
            self._keep(f"random generator {name}", hashlib.sha256(pickle.dumps(state)).hexdigest())
        self._keep("hook", self._hooks)
        self._hooks.clear()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values within a value, with their names."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach().to("cpu", copy=True)
    elif isinstance(value, (int, float, str, bytes, type(None))):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name} {key}", part)
    elif isinstance(value, (list, tuple, deque)):
        for number, part in enumerate(value):
            yield from _leaves(f"{name} {number}", part)
        yield f"length of {name}", len(value)
    elif isinstance(value, (set, frozenset)):
        yield from _leaves(name, sorted(map(repr, value)))
    elif isinstance(value, random.Random):
        yield name, hash(value.getstate())


class _HookOrder(Profiler):
    """Lists the hooks that Lightning calls, except those of the callback that is checked."""

    def __init__(self, hooks: list[str], ignored: tuple[str, ...]) -> None:
        super().__init__()
        self._hooks, self._ignored = hooks, ignored

    @override
    def start(self, action_name: str) -> None:
        if not self._ignored or not action_name.startswith(self._ignored):
            self._hooks.append(action_name)

    @override
    def stop(self, action_name: str) -> None:
        pass
