"""LightningCLI builds `InductorCompile` from YAML, whatever form its settings have, and says what is wrong in it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from compile_callbacks import GraphPass, InductorCompile, InductorConfig, Tune
from tests.support.models import QUIET, Classifier, loader

CONFIG = "compile_callbacks.InductorConfig"
TUNE = "compile_callbacks.Tune"

# Lightning's own calls of jsonargparse.
pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.usefixtures("no_codegen"),
]


class Idle(GraphPass):
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        pass


class Model(Classifier):
    """With loaders of its own, so that YAML has to bring none."""

    def __init__(self) -> None:
        super().__init__()
        self.train_dataloader = self.val_dataloader = lambda: loader(12)


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch):
    # LightningCLI warns where it is given arguments beside those of the process.
    monkeypatch.setattr(sys, "argv", ["main.py"])


def cli(folder: Path, *args: str, run: bool = True, **init_args: Any) -> LightningCLI:
    """LightningCLI on a YAML file in which `InductorCompile` has these arguments."""
    data = {
        "trainer": {
            **QUIET,
            "default_root_dir": str(folder),
            "callbacks": [{"class_path": "compile_callbacks.InductorCompile", "init_args": init_args}],
        }
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    command = [*(["fit"] if run else []), "--config", str(file), *args]
    return LightningCLI(Model, args=command, run=run, save_config_callback=None, seed_everything_default=0)


def callback_of(made: LightningCLI) -> InductorCompile:
    return next(callback for callback in made.trainer.callbacks if isinstance(callback, InductorCompile))


class Fast(InductorConfig):
    """A class of settings whose constructor has other arguments."""

    def __init__(self, level: int = 0) -> None:
        super().__init__(options={"max_autotune": level > 1})


class Patient(Tune):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__(["default", "aten"], steps=10 * blocks)


FORMS: dict[str, tuple[Any, InductorConfig | Tune | None]] = {
    "mode": ("max-autotune-no-cudagraphs", InductorConfig(mode="max-autotune-no-cudagraphs")),
    "mapping": ({"mode": "default", "dynamic": False}, InductorConfig(dynamic=False)),
    "class": (
        {"class_path": CONFIG, "init_args": {"template": "aten", "fullgraph": False, "activation_memory_budget": 0.5}},
        InductorConfig(template="aten", fullgraph=False, activation_memory_budget=0.5),
    ),
    "passes": (
        {"class_path": CONFIG, "init_args": {"passes": [{"class_path": f"{__name__}.Idle", "init_args": {"n": 2}}]}},
        InductorConfig(passes=(Idle(n=2),)),
    ),
    "auto": ("auto", Tune("auto")),
    "tune": (
        {
            "class_path": TUNE,
            "init_args": {
                "candidates": ["default", {"class_path": CONFIG, "init_args": {"template": "aten"}}],
                "steps": 7,
            },
        },
        Tune(["default", InductorConfig(template="aten")], steps=7),
    ),
    "subclass": ({"class_path": f"{__name__}.Fast", "init_args": {"level": 2}}, Fast(2)),
    "subclass of Tune": ({"class_path": f"{__name__}.Patient", "init_args": {"blocks": 3}}, Patient(3)),
    "eager": ("eager", None),
}


@pytest.mark.parametrize("form", FORMS)
def test_cli_builds_every_form_of_a_mode_and_prints_what_builds_it_again(form, tmp_path, capsys):
    given, expected = FORMS[form]
    made = callback_of(cli(tmp_path, run=False, train_mode=given, infer_mode="max-autotune"))
    assert made.arguments.configs == {"train": expected, "infer": InductorConfig(mode="max-autotune")}
    assert type(copy.deepcopy(made).arguments.configs["train"]) is type(expected)

    with pytest.raises(SystemExit):
        cli(tmp_path, "--print_config", run=False, train_mode=given, infer_mode="max-autotune")
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    again = LightningCLI(Model, args=["--config", str(tmp_path / "printed.yaml")], run=False, save_config_callback=None)
    assert callback_of(again).arguments.configs == made.arguments.configs
    in_yaml = yaml.safe_load(printed)["trainer"]["callbacks"][0]["init_args"]
    assert in_yaml["infer_mode"] == "max-autotune"
    if form in ("mode", "auto", "eager"):
        assert in_yaml["train_mode"] == given  # as it was written


def test_a_run_of_the_cli_tries_the_candidates_of_a_tune(tmp_path):
    report = callback_of(cli(tmp_path, train_mode=FORMS["tune"][0], infer_mode="eager", baseline_steps=0)).report
    assert report.train.graphs >= 1
    assert report.train.fallbacks == 0
    assert report.infer.graphs == 0
    assert {trial["candidate"] for trial in report.train.diagnostics.trials} == {"eager", "default", "aten"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"train_mode": "reduce-overheadd"}, "train_mode='reduce-overheadd' is unknown; did you mean 'reduce-overhead'?"),
    ({"infer_mode": {"templat": "aten"}}, "infer_mode: field='templat' is unknown; did you mean 'template'?"),
    ({"train_mode": {"class_path": "torch.nn.Linear"}}, "{'class_path': 'torch.nn.Linear'} creates no InductorC"),
    ({"train_mode": {"class_path": "nowhere.Config"}}, "train_mode={'class_path': 'nowhere.Config'} creates no Ind"),
    ({"baseline_steps": -1}, "baseline_steps=-1 must be 0 or more"),
    ({"passes": [{"class_path": "nowhere.Fast"}]}, "which is not a graph pass"),
    ({"train_mode": {"candidates": ["default"], "steps": 2}}, "steps=2 must be 5 or more"),
]


@pytest.mark.parametrize(("init_args", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_cli_names_the_argument_and_the_value_that_is_wrong(init_args, message, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError, TypeError)) as raised:
        cli(tmp_path, run=False, **init_args)
    told = f"{raised.value}\n{capsys.readouterr().err}"
    assert message in told
    (argument,) = init_args
    assert argument in told
