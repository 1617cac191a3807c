"""Compiled graphs after `torch.compiler.reset()`."""

from __future__ import annotations

import pytest
import torch

from tests.cases.case import Case, check
from tests.support.models import Classifier

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Resets(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5:
            torch.compiler.reset()


def test_a_compile_after_reset_is_counted_and_is_no_sample():
    settings = {"infer_mode": None, "targets": ["net"], "verify": "off"}
    expect = {"train.graphs": 2}
    callback = check(Case(name="reset", make=Resets, train=(4,) * 12, callback=settings, expect=expect))
    series_of_train = callback.report.train.diagnostics.series
    assert [series["steps"] for series in series_of_train if series["kind"] == "compiling"] == [[1, 7]]
