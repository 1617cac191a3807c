"""Runs whose values equal eager's and whose report has no surprise, with every row of settings."""

from __future__ import annotations

import pytest

from tests.cases.case import Case, check, in_columns, net
from tests.cases.zoo import dropout

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


CASES = [
    *in_columns(Case(name="mlp")),
    Case(name="accumulated gradients", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    Case(name="dropout", make=net(dropout), callback={"train_mode": {"options": {"fallback_random": True}}}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_equals_eager(case):
    check(case)
