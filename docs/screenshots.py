"""Make the pictures in docs/images: the plot of a run, TensorBoard, and the report in a terminal. Run the notebook.

The script trains the module of the page "Get started" twice: once as on the page, and once with a last batch that is
smaller, which recompiles. A headless Chromium then opens their logs in TensorBoard, and the pages. The notebook gets
its outputs. The script needs Chromium with chromedriver, and `pip install nbclient ipykernel` for the notebook.

    python docs/screenshots.py              # trains first; a few minutes on two CPU cores
    python docs/screenshots.py LOGDIR       # uses the logs of an earlier run
    python docs/screenshots.py --only site  # some of the pictures; "site", "readme" and "notebook" need no logs
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
import markdown
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.terminal_theme import MONOKAI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from compile_callbacks import CompileReport, InductorCompile
from compile_callbacks.report.console import to_plain_text
from compile_callbacks.report.data import FILE_NAME
from compile_callbacks.report.file import read_records
from compile_callbacks.report.loggers import PLOT_TAG

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RUNS = {"start": True, "ragged": False}
"""The names of the runs in TensorBoard, and whether their last batch is dropped."""
PICTURES = ("steps", "tensorboard", "terminal", "notebook", "readme", "site")


def start_page() -> dict[str, Any]:
    """Run the first block of the page "Get started": the module and its data."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def fit(name: str, logdir: Path) -> None:
    """Train the module of the page "Get started" once."""
    torch.set_num_threads(1)  # the model is too small for two threads, and one varies less on a busy machine
    pl.seed_everything(0)
    page = start_page()
    trainer = pl.Trainer(
        max_epochs=20,
        callbacks=[InductorCompile()],
        logger=TensorBoardLogger(logdir, name="", version=name),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=10,
        accelerator="cpu",
    )
    train = DataLoader(torch.utils.data.Subset(page["train"], range(1250)), 64, shuffle=True, drop_last=RUNS[name])
    trainer.fit(page["Digits"](), train, DataLoader(page["val"], 64, drop_last=True))


def fit_all(logdir: Path) -> None:
    """Train each run in its own process, with an empty compiler cache."""
    for name in RUNS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--fit", name, str(logdir)]
            subprocess.run(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, check=True)


def show_tensorboard(logdir: Path) -> None:
    """Save pictures of the tabs that the page "The report" describes."""
    with browser.tensorboard(logdir) as address, browser.chromium() as driver:

        def show(tab: str, ready: Any, width: int, height: int) -> None:
            driver.set_window_size(width, height)
            driver.get("about:blank")
            driver.get(f"{address}#{tab}")
            browser.wait_for(driver, ready, tab)

        def save(name: str) -> None:
            driver.execute_async_script("setTimeout(arguments[0], 2500)")  # charts are drawn with a transition
            driver.save_screenshot(str(IMAGES / f"tensorboard-{name}.png"))

        def some(selector: str, count: int) -> Any:
            return lambda: len(browser.visible(driver, selector)) >= count

        show("custom_scalars", some("path.line", 8), 1400, 1100)
        save("custom-scalars")
        show("text", some("td", 20), 1400, 880)
        save("text")


def save_steps(logdir: Path) -> None:
    """Save the plot of the first run, from its log."""
    log = EventAccumulator(str(logdir / next(iter(RUNS))))
    log.Reload()
    (IMAGES / "steps.png").write_bytes(log.Images(PLOT_TAG)[-1].encoded_image_string)


def show_terminal(logdir: Path) -> None:
    """Draw the table that a terminal shows at the end of a run."""
    report = CompileReport.from_dict(read_records(logdir / next(iter(RUNS)) / FILE_NAME)[-1]["report"])
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    console.print(f"torch.compile report\n{to_plain_text(report, 100)}", markup=False)
    page = console.export_html(theme=MONOKAI, inline_styles=True)
    with tempfile.TemporaryDirectory() as folder, browser.chromium(900, 900) as driver:
        file = Path(folder, "terminal.html")
        file.write_text(page)
        driver.get(file.as_uri())
        pre = driver.find_element("css selector", "pre")
        style = "display: inline-block; padding: 1em; margin: 0; font: 15px/1.17 'DejaVu Sans Mono', monospace"
        driver.execute_script("arguments[0].style.cssText = arguments[1]", pre, style)
        pre.screenshot(str(IMAGES / "terminal-report.png"))


def run_notebook() -> None:
    """Run the notebook with an empty compiler cache, and write its outputs into it, without the lines of loggers."""
    import nbformat
    from nbclient import NotebookClient

    path = ROOT / "examples" / "quickstart.ipynb"
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # the kernel is a process of its own
        NotebookClient(notebook, timeout=600, record_timing=False).execute()
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    nbformat.write(notebook, path)


def show_site() -> None:
    """Build the site, and save a picture of its front page in build/, for a look at it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
        with browser.served(Path(folder)) as address, browser.chromium(1400, 1000) as driver:
            driver.get(f"{address}/index.html")
            browser.wait_for(driver, lambda: browser.visible(driver, "article h1"), "the front page")
            browser.wait_for(driver, lambda: browser.visible(driver, "input.md-search__input"), "the search field")
            driver.save_screenshot(str(ROOT / "build" / "site.png"))


def show_readme(path: Path) -> None:
    """Save a picture of the README in build/, for a look at it."""
    page = markdown.markdown((ROOT / "README.md").read_text(), extensions=["tables", "fenced_code"])
    style = (
        "body {max-width: 1012px; margin: 2em auto; font: 16px/1.5 sans-serif} img {max-width: 100%} "
        "table {border-collapse: collapse} td, th {border: 1px solid #ccc; padding: 6px 13px} pre {background: #eee}"
    )
    with tempfile.TemporaryDirectory() as folder, browser.chromium(1200, 2600) as driver:
        file = Path(folder, "readme.html")
        file.write_text(f"<base href='{ROOT.as_uri()}/'><style>{style}</style>{page}")
        driver.get(file.as_uri())
        driver.save_screenshot(str(path))


def main(argv: Sequence[str] | None = None) -> None:
    """Train unless there are logs, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logdir", type=Path, nargs="?", help="the logs of an earlier run (default: train)")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, help="which pictures (default: all)")
    parser.add_argument("--fit", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.fit:
        fit(args.fit, args.logdir)
        return
    IMAGES.mkdir(exist_ok=True)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        logdir = args.logdir or Path(folder, "runs")
        if args.logdir is None and set(args.only) - {"site", "readme", "notebook"}:
            fit_all(logdir)
        if "steps" in args.only:
            save_steps(logdir)
        if "tensorboard" in args.only:
            show_tensorboard(logdir)
        if "terminal" in args.only:
            show_terminal(logdir)
        if "notebook" in args.only:
            run_notebook()
        if "readme" in args.only:
            show_readme(ROOT / "build" / "readme.png")
        if "site" in args.only:  # last, because it contains the other pictures
            show_site()


if __name__ == "__main__":
    main()
