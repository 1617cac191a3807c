"""Make the pictures in docs/images: of step times, TensorBoard, the table in a terminal, and the documentation site.

Two short fits of what the page "Start here" trains; then a headless Chromium looks at their logs, at the table, and at
the site. Needs Chromium with chromedriver, selenium, and scikit-learn for its handwritten digits.

    python docs/screenshots.py              # fits anew, about two minutes on two CPU cores
    python docs/screenshots.py LOGDIR       # pictures of logs that are there already
    python docs/screenshots.py --only site  # some of the pictures; the site needs no logs
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import browser
import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.terminal_theme import MONOKAI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile
from compile_callbacks.report.console import report_parts
from compile_callbacks.report.file import FILE_NAME, read_records, report_in
from compile_callbacks.report.tensorboard import PLOT_TAG

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MODES = ("default", "max-autotune-no-cudagraphs")
PICTURES = ("steps", "tensorboard", "terminal", "site")
SITE_PAGES = ("how_it_works",)


def start_page() -> dict[str, Any]:
    """What the first block of the page "Start here" defines: the module and its data."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def fit(mode: str, logdir: Path) -> None:
    """Train once what the page "Start here" trains."""
    torch.set_num_threads(1)  # so small a model gains nothing by two, and would be slowed by what else runs
    pl.seed_everything(0)
    page = start_page()
    trainer = pl.Trainer(
        max_epochs=12,
        callbacks=[InductorCompile(mode, mode)],
        logger=TensorBoardLogger(logdir, name="", version=mode),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=10,
        accelerator="cpu",
    )
    train, val = DataLoader(page["train"], 64, shuffle=True), DataLoader(page["val"], 64, drop_last=True)
    trainer.fit(page["Digits"](), train, val)


def fit_all(logdir: Path) -> None:
    """Train with each mode, each in a process and with a compiler cache of its own."""
    for mode in MODES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--fit", mode, str(logdir)]
            subprocess.run(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, check=True)


def show_tensorboard(logdir: Path) -> None:
    """Look at each tab, and keep what it shows."""
    with browser.tensorboard(logdir) as address, browser.chromium() as driver:

        def show(tab: str, ready: Any, width: int, height: int) -> None:
            driver.set_window_size(width, height)
            driver.get("about:blank")
            driver.get(f"{address}#{tab}")
            browser.wait_for(driver, ready, tab)

        def keep(name: str) -> None:
            driver.execute_async_script("setTimeout(arguments[0], 2500)")  # charts are drawn with a transition
            driver.save_screenshot(str(IMAGES / f"tensorboard-{name}.png"))

        def some(selector: str, count: int) -> Any:
            return lambda: len(browser.visible(driver, selector)) >= count

        show("custom_scalars", some("path.line", 8), 1520, 1100)
        for legend in browser.visible(driver, ".toggle-matches-button")[:1]:
            legend.click()
        keep("custom-scalars")
        show("text", some("td", 20), 1200, 880)
        keep("text")


def keep_steps(logdir: Path) -> None:
    """Keep the picture of step times that the first run left in its log."""
    log = EventAccumulator(str(logdir / MODES[0]))
    log.Reload()
    (IMAGES / "steps.png").write_bytes(log.Images(PLOT_TAG)[-1].encoded_image_string)


def show_terminal(logdir: Path) -> None:
    """Draw the table that a terminal shows at the end of a run."""
    report = report_in(read_records(logdir / MODES[0] / FILE_NAME)[-1])
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    verdicts, table, below = report_parts(report)
    for part in ("torch.compile report", *verdicts, "", table, *below):
        console.print(part)
    page = console.export_html(theme=MONOKAI, inline_styles=True)
    with tempfile.TemporaryDirectory() as folder, browser.chromium(900, 900) as driver:
        file = Path(folder, "terminal.html")
        file.write_text(page)
        driver.get(file.as_uri())
        pre = driver.find_element("css selector", "pre")
        style = "display: inline-block; padding: 1em; margin: 0; font: 15px/1.17 'DejaVu Sans Mono', monospace"
        driver.execute_script("arguments[0].style.cssText = arguments[1]", pre, style)
        pre.screenshot(str(IMAGES / "terminal-report.png"))


def show_site() -> None:
    """Build the site, and look at some of its pages."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
        with browser.served(Path(folder)) as address, browser.chromium(1400, 900) as driver:
            look_at_site(driver, address)


def look_at_site(driver: Any, address: str) -> None:
    """Look at some pages of the site, and keep what they show."""
    for name in SITE_PAGES:
        driver.get(f"{address}/{name}.html")
        browser.wait_for(driver, lambda: browser.visible(driver, "article h1"), name)
        browser.wait_for(driver, lambda: browser.visible(driver, "input.md-search__input"), "the search field")
        driver.save_screenshot(str(IMAGES / f"site-{name.replace('_', '-')}.png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Fit if need be, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logdir", type=Path, nargs="?", help="logs that are there already; without it: fit anew")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, help="which pictures (default: all)")
    parser.add_argument("--fit", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.fit:
        fit(args.fit, args.logdir)
        return
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        logdir = args.logdir or Path(folder, "runs")
        if args.logdir is None and set(args.only) - {"site"}:
            fit_all(logdir)
        if "steps" in args.only:
            keep_steps(logdir)
        if "tensorboard" in args.only:
            show_tensorboard(logdir)
        if "terminal" in args.only:
            show_terminal(logdir)
        if "site" in args.only:  # last, as the other pictures are in it
            show_site()


if __name__ == "__main__":
    main()
