"""Graph breaks that a setting of Dynamo removes, and modules that would break graphs or recompile without one."""

from __future__ import annotations

import ast
import functools
import logging
import re
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.report.summary import next_step
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import FEATURES, Classifier, fit, mlp

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

LOGGER = logging.getLogger("test")


class Item(nn.Module):
    """Multiplies by a number of a tensor, which breaks the graph."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x * (1 + x.abs().max().item()))


def make():
    return Classifier(Item())


def test_a_setting_of_dynamo_is_in_effect_for_our_compiles_only():
    callback = InductorCompile({"dynamo": {"capture_scalar_outputs": True}}, None, baseline_steps=0)
    assert_fits_as_eager(callback, make=make)
    train = callback.report.train
    assert (train.graphs, train.graph_breaks) == (1, 0)
    assert train.verified == "equal 1"
    assert not torch._dynamo.config.capture_scalar_outputs
    of_user = torch._dynamo.explain(Item())(torch.ones(2, FEATURES))
    assert of_user.graph_break_count == 1


class Several(Item):
    """Breaks the graph three times. A setting is known for two of them."""

    def forward(self, x):
        x = x * (1 + x.abs().max().item())
        torch._dynamo.graph_break()
        x = x - x[x > 0].mean()
        return self.net(x)


def test_the_report_names_the_settings_that_remove_graph_breaks_and_how_many():
    callback = InductorCompile("default", None, baseline_steps=0)
    fit(callback, make=lambda: Classifier(Several()), validation=None)
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    assert callback.report.train.graph_breaks == 3
    (mode, count), *_ = re.findall(r"train_mode=(\{.*\}\}) may remove (.*)", next_step(callback.report))
    assert (ast.literal_eval(mode), count) == ({"dynamo": settings}, "2 of 3 graph breaks")
    healed = InductorCompile(ast.literal_eval(mode), None, baseline_steps=0)
    fit(healed, make=lambda: Classifier(Several()), validation=None)
    assert healed.report.train.graph_breaks == 1
    assert "may remove" not in next_step(healed.report)


def warn():
    warnings.warn("a line")  # noqa: B028  (with a keyword, torch does not move the call)


@pytest.mark.parametrize(
    ("call", "setting"),
    [
        (functools.partial(print, "a line"), "{'reorderable_logging_functions': ['print']}"),
        (warn, "{'reorderable_logging_functions': ['warnings.warn']}"),
        (functools.partial(logging.info, "a line"), "{'ignore_logging_functions': ['logging']}"),
        (functools.partial(LOGGER.info, "a line"), "{'ignore_logging_functions': ['logging']}"),
    ],
)
@pytest.mark.filterwarnings("ignore:a line")
def test_settings_for_printed_lines_are_named_and_remove_the_break(call, setting):
    class Prints(Item):
        def __init__(self):
            super().__init__()
            self.call = call

        def forward(self, x):
            x = self.net(x)
            self.call()
            return x.sin()

    def run(mode):
        callback = InductorCompile(mode, None, baseline_steps=0)
        fit(callback, make=lambda: Classifier(Prints()), train=4, validation=None)
        return callback.report

    advice = next_step(run("default"))
    assert f"'dynamo': {setting}" in advice
    assert ("and drops the log lines" in advice) == ("ignore" in setting)
    assert run({"dynamo": ast.literal_eval(setting)}).train.graph_breaks == 0
