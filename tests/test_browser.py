"""TensorBoard's page on the log folder of a real run, as a browser shows it."""

from __future__ import annotations

import importlib.util

import browser
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from models import Classifier, loader, trainer

from compile_callbacks import InductorCompile

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(browser.DRIVER is None, reason="needs chromedriver"),
    pytest.mark.skipif(importlib.util.find_spec("selenium") is None, reason="needs selenium"),
]


class WithHparams(Classifier):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Loads a tab of TensorBoard, on the logs of two runs."""
    torch._dynamo.reset()
    logdir = tmp_path_factory.mktemp("logs")
    for run, mode in {"first": "default", "second": "aten"}.items():
        logger = TensorBoardLogger(logdir, name="", version=run)
        callback = InductorCompile(train_mode=mode, baseline_steps=2)
        trainer(callback, logger=logger, max_epochs=2).fit(WithHparams(), loader(12), loader(8))
    with browser.tensorboard(logdir) as address, browser.chromium() as driver:

        def load(tab):
            driver.get("about:blank")  # a change of the fragment alone would not load anew
            driver.get(f"{address}#{tab}")
            return driver

        yield load


def test_scalars_tab_has_the_charts(page):
    # A filter, because TensorBoard shows the first two groups alone, and twelve charts of a group.
    driver = page("scalars&tagFilter=%2Ftrain%2F")
    wanted = {"compile/train/seconds", "step/train/eager_ms", "step/train/compiled_ms", "step/train/speedup"}

    def shown():
        return {heading.partition("\n")[0] for heading in browser.texts(driver, "tf-card-heading")}

    browser.wait_for(driver, lambda: wanted <= shown(), f"charts of {wanted}")
    # Two runs: a line each.
    browser.wait_for(driver, lambda: len(browser.visible(driver, "path.line")) >= 2 * len(wanted), "two lines a chart")


def test_custom_scalars_tab_has_eager_and_compiled_on_one_chart(page):
    driver = page("custom_scalars")
    card = "tf-custom-scalar-multi-line-chart-card"
    charts = ["ms a step, eager and compiled", "speedup", "seconds spent compiling"]

    def shown():
        return [text.splitlines()[0] for text in browser.texts(driver, card)]

    browser.wait_for(driver, lambda: shown()[:3] == charts, f"charts {charts}")
    # Two runs, eager and compiled: four lines.
    browser.wait_for(driver, lambda: "Matches (4)" in browser.texts(driver, card)[0], "four lines in the first chart")


def test_text_tab_has_the_report_as_tables(page):
    driver = page("text")
    wanted = {"speedup", "mode", "aten", "torch"}
    browser.wait_for(driver, lambda: "Compile report" in browser.texts(driver, "h2"), "the report's heading")
    browser.wait_for(driver, lambda: wanted <= set(browser.texts(driver, "td")), f"cells {wanted}")


def test_hparams_tab_has_one_row_a_run_with_modes_and_figures(page):
    driver = page("hparams")

    def shown():
        return browser.texts(driver, "vaadin-grid-cell-content")

    wanted = {"lr", "compile/train_mode", "compile/infer_mode", "default", "aten"}
    browser.wait_for(driver, lambda: wanted <= set(shown()), f"cells {wanted}")
    assert sorted(cell for cell in shown() if cell.startswith(("first", "second"))) == ["first", "second"]
