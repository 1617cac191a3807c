"""Random arguments of the constructor: each set works on a tiny model, or is refused with the argument's name.

``COMPILE_CALLBACKS_EXAMPLES`` sets how many are tried; 1,000 take about ten minutes.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from models import FEATURES, loader, trainer
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, InductorConfig, graph_pass

pytestmark = pytest.mark.newest

EXAMPLES = int(os.environ.get("COMPILE_CALLBACKS_EXAMPLES", "12"))


class Tiny(pl.LightningModule):
    """Nothing in it that Dynamo cannot trace: no combination of good settings has a reason to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@graph_pass
def changes_nothing(graph, is_inference):
    pass


@graph_pass(hook="post_grad_pre")
def changes_nothing_early(graph, is_inference):
    pass


# ------------------------------------------------------------------------------------------ arguments, good and bad

_SWITCHES = [
    "epilogue_fusion",
    "max_autotune",
    "shape_padding",
    "fallback_random",
    "freezing",
    "implicit_fallbacks",
    "triton.cudagraphs",
    "triton.unique_kernel_names",
    "cpp.enable_tiling_heuristics",
    "pattern_matcher",
    "split_reductions",
    "reorder_for_locality",
    "keep_output_stride",
    "debug_fusion",
]
_PASSES = st.lists(st.sampled_from([changes_nothing, changes_nothing_early]), max_size=2)
_MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"]
_FIELDS = {
    "fullgraph": st.booleans(),
    "dynamic": st.none() | st.booleans(),
    "passes": _PASSES,
    "freezing": st.none() | st.booleans(),
    "template": st.sampled_from([None, "aten", "freezing", "triton", "cudagraphs"]),
    "fold_weights": st.none() | st.booleans(),
    "fold_limit_mb": st.sampled_from([1e-9, 0.001, 64, 1e30]),
}
_WITH_MODE = st.fixed_dictionaries({}, optional={"mode": st.sampled_from([None, *_MODES]), **_FIELDS})
_WITH_OPTIONS = st.fixed_dictionaries(
    {"options": st.dictionaries(st.sampled_from(_SWITCHES), st.booleans(), max_size=3)}, optional=_FIELDS
)
_CONFIGS = _WITH_MODE | _WITH_OPTIONS
GOOD_MODE = (
    st.sampled_from([None, "eager", "aten", "tma", *_MODES])
    | _CONFIGS
    | _CONFIGS.map(lambda settings: InductorConfig(**settings))
)
BAD_MODE = st.sampled_from(
    [
        "reduce_overhead",
        "",
        7,
        True,
        ["default"],
        object(),
        {"mode": "fast"},
        {"mode": 3},
        {"options": {"max_autotun": True}},
        {"options": {"max_autotune": "yes"}},
        {"options": ["max_autotune"]},
        {"options": {1: True}},
        {"mode": "default", "options": {"max_autotune": True}},
        {"fullgraph": 1},
        {"dynamic": "auto"},
        {"template": "atn"},
        {"template": 3},
        {"freezing": 1},
        {"fold_weights": "yes"},
        {"fold_limit_mb": 0},
        {"fold_limit_mb": float("nan")},
        {"fold_limit_mb": True},
        {"fold_limit_mb": "1GB"},
        {"passes": "none"},
        {"passes": [print]},
        {"max_autotune": True},
        {3: True},
    ]
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "train_mode": GOOD_MODE,
    "infer_mode": GOOD_MODE,
    "targets": st.sampled_from([None, "net", ["net"], ["forward"], ["net.*"], "net.0", ["training_step", "net"]]),
    "passes": _PASSES,
    "baseline_steps": st.integers(0, 3) | st.just(10**12),
    "on_error": st.sampled_from(["eager", "raise"]),
    "verify": st.sampled_from(["off", "warn", "eager", "raise"]),
    "new_shapes": st.sampled_from(["recompile", "eager", "raise"]),
    "keep_compiled": st.booleans(),
}
_NO_CHOICE = st.sampled_from(["", "warning", None, 0, True, b"warn", ["warn"]])
BAD: dict[str, st.SearchStrategy[Any]] = {
    "train_mode": BAD_MODE,
    "infer_mode": BAD_MODE,
    "targets": st.sampled_from([[], "", ["net", 3], 3, True, ["no.such"], "net.forwards", [None]]),
    "passes": st.sampled_from([None, 3, "pass", [print], [None], [InductorConfig()]]),
    "baseline_steps": st.sampled_from([-1, True, 1.5, "ten", None, float("nan")]),
    "on_error": _NO_CHOICE,
    "verify": _NO_CHOICE,
    "new_shapes": _NO_CHOICE,
    "keep_compiled": st.sampled_from([None, 1, "yes"]),
}


@st.composite
def arguments(draw: Any) -> tuple[dict[str, Any], set[str]]:
    """A random set of arguments, and which of them are bad: none, mostly."""
    given_names = draw(st.sets(st.sampled_from(list(GOOD))))
    bad = draw(st.just(set()) | st.sets(st.sampled_from(sorted(given_names)), max_size=2)) if given_names else set()
    return {name: draw((BAD if name in bad else GOOD)[name]) for name in sorted(given_names)}, bad


# ------------------------------------------------------------------------------------------ what becomes of them


@pytest.mark.timeout(3600)
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(arguments())
def test_random_settings_work_or_are_refused_by_name(drawn):
    chosen, bad = drawn
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # A tiny model on a CPU: advice about speed and settings without effect is right, and not looked at here.
        warnings.simplefilter("ignore", CompileWarning)
        warnings.simplefilter("ignore", PossibleUserWarning)
        refusal = run(chosen)
    torch._dynamo.reset()  # a module that stays compiled watches for compiles as long as it lives
    event("refused" if refusal else "works")
    if bad:
        assert refusal is not None, f"{bad} went through"
        assert any(names(argument, chosen, refusal) for argument in bad), refusal
        assert refusal.endswith("[see docs/troubleshooting.md#a-setting-is-refused]")
    else:
        assert refusal is None, f"good settings are refused: {refusal}"


def run(chosen: dict[str, Any]) -> str | None:
    """Train and predict with the callback; why it was refused, if it was."""
    torch.manual_seed(0)
    module = Tiny()
    try:
        callback = InductorCompile(**chosen)
        trainer(callback).fit(module, loader(4), loader(1))
        trainer(callback).predict(module, loader(1))
    except (ValueError, TypeError) as error:
        return str(error)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    return None


def names(argument: str, chosen: dict[str, Any], message: str) -> bool:
    """Whether an error message names an argument, or the field of a mapping that was given for it."""
    value = chosen[argument]
    fields = list(value) if isinstance(value, dict) else []
    return any(str(name) in message for name in [argument, *fields])
