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
    def __init__(self) -> None:
        super().__init__()
        self.train_dataloader = self.val_dataloader = lambda: loader(12)


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch):
    # LightningCLI warns where it is given arguments beside those of the process.
    monkeypatch.setattr(sys, "argv", ["main.py"])


def cli(folder: Path, *args: str, run: bool = False, **init_args: Any) -> InductorCompile:
    """The callback of LightningCLI with a YAML file in which `InductorCompile` has these arguments."""
    callbacks = [{"class_path": "compile_callbacks.InductorCompile", "init_args": init_args}]
    data = {"trainer": {**QUIET, "default_root_dir": str(folder), "callbacks": callbacks}}
    return built(folder, yaml.safe_dump(data), *args, run=run)


def built(folder: Path, text: str, *args: str, run: bool = False) -> InductorCompile:
    (folder / "config.yaml").write_text(text)
    command = [*(["fit"] if run else []), "--config", str(folder / "config.yaml"), *args]
    made = LightningCLI(Model, args=command, run=run, save_config_callback=None, seed_everything_default=0)
    return next(callback for callback in made.trainer.callbacks if isinstance(callback, InductorCompile))


def of_class(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": name if "." in name else f"{__name__}.{name}", "init_args": init_args}


PARTS = {"template": "aten", "fullgraph": False, "activation_memory_budget": 0.5}
TUNED = of_class(TUNE, candidates=["default", of_class(CONFIG, template="aten")], steps=7)
FORMS: list[tuple[Any, InductorConfig | Tune | None]] = [
    ("max-autotune-no-cudagraphs", InductorConfig(mode="max-autotune-no-cudagraphs")),
    ({"mode": "default", "dynamic": False}, InductorConfig(dynamic=False)),
    (of_class(CONFIG, **PARTS), InductorConfig(**PARTS)),
    (of_class(CONFIG, passes=[of_class("Idle", n=2)]), InductorConfig(passes=(Idle(n=2),))),
    ("auto", Tune("auto")),
    (TUNED, Tune(["default", InductorConfig(template="aten")], steps=7)),
    ("eager", None),
    ("max-autotune", InductorConfig(mode="max-autotune")),
]


@pytest.mark.parametrize(("train", "infer"), list(zip(FORMS[::2], FORMS[1::2], strict=True)))
def test_cli_builds_every_form_of_a_mode_and_prints_what_builds_it_again(train, infer, tmp_path, capsys):
    settings = {"train_mode": train[0], "infer_mode": infer[0]}
    made = cli(tmp_path, **settings)
    assert made.arguments.configs == {"train": train[1], "infer": infer[1]}
    assert type(copy.deepcopy(made).arguments.configs["train"]) is type(train[1])

    with pytest.raises(SystemExit):
        cli(tmp_path, "--print_config", **settings)
    printed = capsys.readouterr().out
    assert built(tmp_path, printed).arguments.configs == made.arguments.configs
    in_yaml = yaml.safe_load(printed)["trainer"]["callbacks"][0]["init_args"]
    written = {name: mode for name, mode in settings.items() if isinstance(mode, str)}
    assert {name: in_yaml[name] for name in written} == written


def test_cli_names_the_argument_and_the_value_that_is_wrong(tmp_path, capsys):
    for argument, value, message in (
        ("train_mode", "reduce-overheadd", "train_mode='reduce-overheadd' is unknown; did you mean 'reduce-overhead'?"),
        ("train_mode", {"class_path": "torch.nn.Linear"}, "train_mode: field='class_path' is unknown"),
        ("passes", [{"class_path": "nowhere.Fast"}], "which is not a graph pass"),
        ("train_mode", {"candidates": ["default"], "steps": 2}, "steps=2 must be 5 or more"),
    ):
        with pytest.raises((SystemExit, ValueError, TypeError)) as raised:
            cli(tmp_path, **{argument: value})
        told = f"{raised.value}\n{capsys.readouterr().err}"
        assert [text in told for text in (message, argument)] == [True, True], told
