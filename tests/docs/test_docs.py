"""Code blocks in the docs run, and documented commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
from lightning.pytorch import LightningDataModule

from compile_callbacks import InductorCompile, cli
from tests.support.models import Classifier, loader

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
WITH_MARKS = ["docs/how_to/several_gpus.md", "docs/reference/compatibility.md"]
BLOCK = re.compile(
    r"^(?P<mark><!-- compiled only: it needs (?:GPUs|another package) -->\n\n?)?"
    r"```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def blocks(page, *languages):
    return [found for found in BLOCK.finditer(PAGES[page].read_text()) if found["language"] in languages]


def source(block):
    """The code of a block; of a diff, the lines after the change."""
    lines = block["code"].splitlines()
    if block["language"] == "diff":
        lines = [line[1:] for line in lines if not line.startswith("-")]
    return textwrap.dedent("\n".join(lines))


WITH_CODE = [page for page in PAGES if blocks(page, "python", "diff")]


def prepared():
    """What a page may use: a tiny model, and data for it."""
    data = LightningDataModule.from_datasets()
    data.train_dataloader, data.val_dataloader = lambda: loader(4), lambda: loader(2)
    return {"model": Classifier(), "datamodule": data, "train_loader": loader(16), "val_loader": loader(2)}


def check_the_recipe(page):
    """Run the commands on the report that the page's run has written."""
    for command in "".join(block["code"] for block in blocks(page, "sh")).splitlines():
        assert not command or cli.main(shlex.split(command)[1:]) == 0
    shown, written = json.loads(blocks(page, "json")[0]["code"]), json.loads(Path("compile_contract.json").read_text())
    assert shown.keys() == written.keys() - {"infer"}
    assert shown["train"].keys() >= written["train"].keys()


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"])
def test_links_of_a_page_outside_of_the_site_lead_to_files_and_headings(page):
    """`make docs` checks the links of the site."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_pages_show_the_reports_of_their_runs(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    gallery = importlib.import_module("report_gallery")
    page = (DOCS / "reference" / "report.md").read_text()
    shown = {"faster": "x faster", "compile time not repaid": "not repaid"}
    verdicts = {example.title: example.verdict for example in gallery.EXAMPLES}
    for title, (sentence, rows) in gallery.SHOWN.items():
        lines = page.partition(f"{sentence}\n\n```text\n")[2].partition("\n```\n")[0]
        assert gallery.shortened(lines, rows) == lines
        assert lines.startswith("train   ")
        assert shown.get(verdicts[title], verdicts[title]) in lines.splitlines()[0]
    assert f"```text\n{gallery.readme_report()}\n```\n" in gallery.README.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.usefixtures("dropped_backends_go")
@pytest.mark.filterwarnings("ignore:.* asks for CUDA graphs, and the module is not on a GPU")  # it may be read on a CPU
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parent / f"code_of_{page.replace('/', '_')}"  # torch's cache identifies a pass by it
    namespace = prepared()
    dynamo = torch._dynamo.config.get_config_copy()
    try:
        for block in blocks(page, "python", "diff"):
            code = compile(source(block), str(file), "exec")
            assert not block["mark"] or page in WITH_MARKS
            if not block["mark"]:
                exec(code, namespace)
        if page == "docs/how_to/keep_it_compiled.md":
            check_the_recipe(page)
        for test in [value for name, value in namespace.items() if name.startswith("test_")]:
            test()
    finally:
        now = torch._dynamo.config.get_config_copy()
        torch._dynamo.config.load_config({name: value for name, value in dynamo.items() if now[name] != value})
        torch._dynamo.reset()


def commands():
    """Commands in blocks of shell and between backticks, with the page that they stand on."""
    for page, path in PAGES.items():
        for block in blocks(page, "sh", "bash"):
            yield from ((page, line) for line in block["code"].splitlines() if line)
        for block in blocks(page, "console"):
            yield from ((page, line[2:]) for line in block["code"].splitlines() if line.startswith("$ "))
        text = BLOCK.sub("", path.read_text())
        inline = re.findall(r"`((?:python3? |make |compile-callbacks )[^`]+)`", text)
        yield from ((page, " ".join(command.split())) for command in inline)


def test_commands_name_files_targets_and_options_that_there_are(capsys):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen = set()
    for page, command in commands():
        program, *arguments = shlex.split(command, comments=True)
        if program.startswith("COMPILE_CALLBACKS="):  # before the name of a user's script
            InductorCompile(program.partition("=")[2])
            continue
        seen.add(program)
        if program == "make":
            assert {argument for argument in arguments if "=" not in argument} <= set(targets), (page, command)
        elif program == "python" and arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file(), (page, command)
        elif program == "compile-callbacks" and arguments[0] != "COMMAND":
            with pytest.raises(SystemExit):
                cli.main([*(name for name in arguments[:1] if not name.startswith("--")), "--help"])
            options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
            known = capsys.readouterr().out
            assert all(option in known for option in options), (page, command)
    assert seen == {"make", "python", "compile-callbacks", "pip", "tensorboard"}


def test_figures_and_chart_of_the_pages_are_those_of_the_files_in_benchmarks_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = importlib.import_module("pages")
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    pages.main()

    def other(found):
        used.add(found[3])
        return found[1] + re.sub(r"\d\b", lambda digit: str((int(digit[0]) + 1) % 10), found[4]) + found[5]

    used = set()
    for text in [path.read_text() for path in pages.PAGES]:
        assert pages.filled(pages.FIGURES.sub(other, text)) == text  # each figure of the page comes from a file
    names = [*pages.TABLES, *(summary.__name__ for summary in pages.SUMMARIES)]
    assert len(names) == len(set(names))
    assert {"answer"} <= used - {None} <= set(names)
