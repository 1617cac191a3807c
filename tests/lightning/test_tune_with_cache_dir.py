"""Runs with a `Tune` and a ``cache_dir``, whose winners are stored by the fingerprint of the module."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from compile_callbacks import InductorCompile, Tune
from tests.support.models import Classifier, loader, mlp, trainer
from tests.support.step_times import Times


class Mocked(Classifier):
    """A module as tests of users make it."""

    tracker = MagicMock()


class Unprintable(Classifier):
    def extra_repr(self):
        raise RuntimeError("printed before setup")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [Mocked, Unprintable])
def test_tune_stores_its_winner_for_a_module_that_cannot_be_described(make, tmp_path, monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    callback = InductorCompile(Tune(["default"], steps=5), None, cache_dir=tmp_path)
    trainer(callback, max_epochs=1, enable_model_summary=False).fit(make(mlp()), loader(20))
    assert [trial["candidate"] for trial in callback.report.train.diagnostics.trials] == ["eager", "default"]
    assert len(list(tmp_path.glob("model-*.json"))) == 1
