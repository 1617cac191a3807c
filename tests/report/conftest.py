"""The golden run: a fit and a test with every logger, whose files, lines and records the tests of this folder read."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from compile_callbacks import CompileReport, InductorCompile
from compile_callbacks.cli import main
from tests.support.models import CLASSES, FEATURES, Classifier, RecordingLogger, loader, trainer
from tests.support.pairs import made_once
from tests.support.step_times import Times

FILE = "compile_report.json"
STEP_MS = {"eager": 12.0, None: 6.0}  # `None` is compiled


class Two(Classifier):
    """Calls two children in training, and the forward method in validation."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.side = nn.Linear(FEATURES, CLASSES)

    def logits(self, x):
        return self.net(x) + self.side(x)

    def forward(self, x):
        return self.logits(x)


class Golden:
    """The files of the golden run. `_run` sets the attributes of ``golden.json``."""

    def __init__(self, folder: Path) -> None:
        vars(self).update(json.loads((folder / "golden.json").read_text()))
        self.board, self.csv = folder / "tensorboard" / "version_0", folder / "csv" / "version_0"
        self.records = json.loads((self.board / FILE).read_text())
        [record] = json.loads((folder / "saved" / "report.json").read_text())
        self.report = CompileReport.from_dict(record["report"])


def _run(folder: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    logger, lines, handler = RecordingLogger(), [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning.pytorch").addHandler(handler)
    callback, printed = InductorCompile(baseline_steps=5), io.StringIO()
    found: dict[str, Any] = {}
    callback.on_sanity_check_end = lambda *args: found.update(sanity_graphs=callback.report.infer.graphs)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(fallback_by_default=True),
        contextlib.redirect_stdout(printed),
    ):
        patch.chdir(folder)
        Times(patch, train=STEP_MS, infer=STEP_MS)
        loggers = [TensorBoardLogger("", name="tensorboard"), CSVLogger("", name="csv"), logger]
        run, module = trainer(callback, logger=loggers, max_epochs=2), Two()
        run.fit(module, loader(12), loader(8))
        found["after_fit"] = callback.report.to_dict()
        run.test(module, loader(2), verbose=False)
        callback.report.save("saved/report.json")
        callback.report.save("saved/report.json")  # replaces the file
        on_rank_0, logger.calls, found["printed"] = logger.calls, [], printed.getvalue()
        patch.setattr(rank_zero_only, "rank", 1)
        run.fit_loop.max_epochs = 3
        run.fit(module, loader(3))
    logging.getLogger("lightning.pytorch").removeHandler(handler)
    found |= {"lines": [line for line in lines if FILE in line], "logged": [on_rank_0, logger.calls]}
    (folder / "golden.json").write_text(json.dumps(found))


@pytest.fixture(scope="session")
def golden(tmp_path_factory, worker_id):
    return Golden(made_once("golden", _run, tmp_path_factory, worker_id))


@pytest.fixture
def command(capsys):
    """Runs ``compile-callbacks``, and returns its stdout and stderr."""

    def command(*arguments, status=0):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == status
        return capsys.readouterr()

    return command
