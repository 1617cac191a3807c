"""Code blocks in the docs run, and documented commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
import yaml
from lightning.pytorch import LightningDataModule

from compile_callbacks import InductorCompile, PhaseReport, cli
from compile_callbacks.report.data import PhaseDiagnostics
from tests.support.models import CLASSES, FEATURES, Classifier, loader

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
GPU_ONLY = "<!-- compiled only: it needs GPUs -->"
BLOCK = re.compile(
    rf"^(?P<mark>{re.escape(GPU_ONLY)}\n\n?)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(page, *languages):
    return [found for found in BLOCK.finditer(PAGES[page].read_text()) if found["language"] in languages]


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def prepared(page):
    """What a page may use: a tiny model, and data for it."""
    # `max-autotune` compiles each matrix product in many ways.
    model = Classifier(torch.nn.Linear(FEATURES, CLASSES)) if page == "README.md" else Classifier()
    data = LightningDataModule.from_datasets()
    data.train_dataloader, data.val_dataloader = lambda: loader(4), lambda: loader(2)
    return {"model": model, "datamodule": data, "train_loader": loader(16), "val_loader": loader(2)}


def check_the_passes_of_the_page(namespace):
    """Run the test that the page shows, which checks the pass that it writes."""
    namespace["test_tanh_is_clamped_in_inference"]()


def check_the_recipe_of_the_page(namespace):
    """Run the commands on the report that the page's run has written, and the tests that the page shows."""
    for command in (
        line for block in blocks("docs/how_to/keep_it_compiled.md", "sh") for line in block["code"].split("\n")
    ):
        assert not command or cli.main(shlex.split(command)[1:]) == 0
    fields = json.loads(blocks("docs/how_to/keep_it_compiled.md", "json")[0]["code"])
    assert fields.keys() == json.loads(Path("compile_contract.json").read_text()).keys() - {"infer"}
    assert fields["train"].keys() >= json.loads(Path("compile_contract.json").read_text())["train"].keys()
    namespace["test_compiled_training_is_eager_training"]()
    namespace["test_the_settings_of_our_runs_train_as_eager_does"]()


def test_the_page_of_the_report_describes_each_figure_and_scalar():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    lines = hooks.with_figures(PAGES["docs/reference/report.md"].read_text()).splitlines()
    for figures in (PhaseReport, PhaseDiagnostics):
        for name, figure in figures.declared().items():
            row = f"`{figure.label(name)}`" if figure.group else ""
            (line,) = (line for line in lines if line.startswith(f"| `{name}` | {row} | "))
            assert line.endswith(". |")
            assert not figure.scalar or f"| `{figure.scalar}` | `{name}` |" in lines
    assert "| `eager_step_ms` | `eager step ms` | Median time" in "\n".join(lines)


OUTSIDE_OF_THE_SITE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"]


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE_OF_THE_SITE)
def test_links_of_a_page_outside_of_the_site_lead_to_files_and_headings(page):
    """`make docs` checks the links of the site."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_drawing_of_the_data_path_names_functions_that_exist():
    drawn = re.findall(r"^ *([\w.]+)(?:, \.\w+)? +([\w/]+\.py)\b", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(drawn) > 20
    for name, path in drawn:
        found = importlib.import_module("compile_callbacks." + path.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), (name, path)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.usefixtures("dropped_backends_go")
@pytest.mark.filterwarnings("ignore:.* asks for CUDA graphs, and the module is not on a GPU")  # it may be read on a CPU
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path(__file__).parent / f"code_of_{page.replace('/', '_')}"  # torch's cache identifies a pass by it
    namespace = prepared(page)
    dynamo = torch._dynamo.config.get_config_copy()
    try:
        for block in blocks(page, "python"):
            code = compile(block["code"], str(source), "exec")
            if not block["mark"]:
                exec(code, namespace)
        if page == "docs/how_to/graph_passes.md":
            check_the_passes_of_the_page(namespace)
        if page == "docs/how_to/keep_it_compiled.md":
            check_the_recipe_of_the_page(namespace)
    finally:
        now = torch._dynamo.config.get_config_copy()
        torch._dynamo.config.load_config({name: value for name, value in dynamo.items() if now[name] != value})
        torch._dynamo.reset()


def test_few_blocks_are_not_run():
    marked = {page: sum(bool(block["mark"]) for block in blocks(page, "python")) for page in WITH_CODE}
    assert {page for page, count in marked.items() if count} <= {"docs/how_to/several_gpus.md"}


# ------------------------------------------------------------------------------------------ commands


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


def script_and_its_neighbours(script):
    """A script and the files beside it that it imports, which may add options of its parser."""
    imported = re.findall(r"^(?:from|import) (\w+)", script.read_text(), re.MULTILINE)
    return [script, *(file for name in imported if (file := script.with_name(f"{name}.py")).is_file())]


def help_of(commands, capsys):
    with pytest.raises(SystemExit):
        cli.main([*commands, "--help"])
    return capsys.readouterr().out


def test_commands_name_files_targets_and_options_that_there_are(capsys):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed = {"tensorboard", "compile-callbacks"}
    seen = set()
    for page, command in commands():
        program, *arguments = shlex.split(command, comments=True)
        if program.startswith("COMPILE_CALLBACKS="):  # before the name of a user's script
            InductorCompile(program.partition("=")[2])
            continue
        if (program, *arguments[:2]) == ("python", "-m", "compile_callbacks"):
            program, arguments = "compile-callbacks", arguments[2:]
        seen.add(program)
        options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
        if program == "make":
            assert {argument for argument in arguments if "=" not in argument} <= set(targets), (page, command)
        elif program == "python" and arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), (page, command)
        elif program == "python":
            script = ROOT / arguments[0]
            assert script.is_file(), (page, command)
            known = "".join(file.read_text() for file in script_and_its_neighbours(script))
            known += re.sub('"--(?=.*BooleanOptionalAction)', '"--no-', known)
            assert all(f'"{option}"' in known for option in options), (page, command)
        elif program == "compile-callbacks":
            if arguments[0] != "COMMAND":
                known = help_of([name for name in arguments[:1] if not name.startswith("--")], capsys)
                assert all(option in known for option in options), (page, command)
        elif program == "pip":
            what, _, extra = arguments[1].partition("[")
            assert (arguments[0], what) == ("install", "."), (page, command)
            named = extra.removesuffix("]").split(",") if extra else []
            assert all(f"\n{name} = [" in (ROOT / "pyproject.toml").read_text() for name in named), (page, command)
        else:
            assert program in installed, (page, command)
    assert seen == {"make", "python", "compile-callbacks", "pip", "tensorboard"}


def test_yaml_in_the_docs_is_yaml():
    found = [block["code"] for page in PAGES for block in blocks(page, "yaml")]
    assert found
    assert all(yaml.safe_load(code) for code in found)
