"""Make the pictures in docs/images: the plot of a run, and the report in a terminal. Run the notebook.

The script runs the code of the page "Get started" twice, as the page does, with one thread, and writes the lines that
the runs logged into the page. A third run has a smaller last batch, which recompiles; only the page about the report
shows it. A headless Chromium then opens the pages. The notebook gets its outputs. The script needs Chromium with
chromedriver, and `pip install nbclient ipykernel` for the notebook.

    python docs/screenshots.py              # trains first; a few minutes on two CPU cores
    python docs/screenshots.py FOLDER       # trains in this folder, or uses the runs that are in it
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

import browser
import markdown
from rich.console import Console
from rich.terminal_theme import MONOKAI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileReport
from compile_callbacks.report.file import FILE_NAME, read_records
from compile_callbacks.report.loggers import PLOT_TAG
from compile_callbacks.report.render import to_plain_text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
START = ROOT / "docs" / "get_started" / "cpu.md"
PICTURES = ("steps", "terminal", "notebook", "readme", "site")


def train_all(folder: Path) -> None:
    """Run the code of the page "Get started" twice."""
    page = START.read_text()
    module, fit, look = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first = "\n".join(train(folder, module + fit + look)[1:])
    train(folder, module + fit + look)
    START.write_text(re.sub(r"(?<=```text\n)compiling.*?(?=\n```)", lambda _: first, page, flags=re.DOTALL))


def train(folder: Path, code: str) -> list[str]:
    """Run the code in a separate process, and return the lines about the train phase's compile that it logged."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "start.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "start.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line for line in result.stderr.splitlines() if line.startswith("compiling ") and "train phase" in line]


def save_steps(run: Path) -> None:
    """Save the plot of a run, from its log."""
    log = EventAccumulator(str(run))
    log.Reload()
    (IMAGES / "steps.png").write_bytes(log.Images(PLOT_TAG)[-1].encoded_image_string)


def show_terminal(run: Path) -> None:
    """Draw the table that a terminal shows at the end of a run."""
    report = CompileReport.from_dict(read_records((run / FILE_NAME).read_bytes())[-1]["report"])
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False)
    console.print(f"torch.compile report\n{to_plain_text(report.phases, 100)}", markup=False)
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
    parser.add_argument("folder", type=Path, nargs="?", help="where to train (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, help="which pictures (default: all)")
    args = parser.parse_args(argv)
    IMAGES.mkdir(exist_ok=True)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        first = folder / "runs" / "start" / "version_0"
        if set(args.only) - {"site", "readme", "notebook"} and not (folder / "runs").exists():
            train_all(folder)
        if "steps" in args.only:
            save_steps(first)
        if "terminal" in args.only:
            show_terminal(first)
        if "notebook" in args.only:
            run_notebook()
        if "readme" in args.only:
            show_readme(ROOT / "build" / "readme.png")
        if "site" in args.only:  # last, because it contains the other pictures
            show_site()


if __name__ == "__main__":
    main()
