"""Code in the docs runs as it stands there, commands are those that there are, and tables name what there is."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config
import yaml
from lightning.pytorch import LightningDataModule
from models import CLASSES, FEATURES, Classifier, loader

import compile_callbacks
from compile_callbacks import InductorCompile, PhaseReport, templates
from compile_callbacks.backend import lifecycle
from compile_callbacks.command_line import cli
from compile_callbacks.reporting.table import labels_and_cells
from compile_callbacks.testing import check_pass

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
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


# ------------------------------------------------------------------------------------------ what pages leave behind


def passes_do_what_they_say(left):
    left.test_gelu_is_approximated_in_inference()
    result = check_pass(left.hard_tanh, torch.nn.Tanh(), torch.randn(4, 8))
    assert result.changed
    result.assert_close(rtol=0, atol=0.5)


def warm_start_is_kept_at_home(left):
    assert left.callback.cache_dir == Path.home() / ".cache/my-project/compiled"


def candidates_are_those_of_the_page(left):
    assert left.callback.report.train.mode.startswith("tune(default | reduce-overhead | max-autotune, dynamic=False")


def a_template_is_registered_and_a_report_printed(left):
    assert left.callback.report.train.mode == "no_fusion"
    assert "aten" in left.printed


def a_package_is_left(left):
    assert left.outputs.shape == (2, 3)
    assert left.callback in left.trainer.callbacks
    assert [file.name for file in Path().iterdir()] == ["model.pt2"]


def a_backend_describes_itself_as_on_the_page(left):
    assert left.loaded.describe() == "features: Sequential, max-autotune-no-cudagraphs, cpu, deployed"
    assert f"  # {left.printed.splitlines()[0]}\n" in PAGES["backend.md"].read_text()


def a_package_is_equal_to_eager(left):
    assert left.exporter.report.verified == "equal"


def an_event_file_is_where_tensorboard_looks(left):
    assert list(Path("runs").rglob("events.out.tfevents.*"))
    assert left.report.train.speedup


LEFT_BEHIND = {
    "backend.md": a_backend_describes_itself_as_on_the_page,
    "deploying.md": a_package_is_equal_to_eager,
    "export.md": a_package_is_left,
    "index.md": an_event_file_is_where_tensorboard_looks,
    "passes.md": passes_do_what_they_say,
    "settings.md": a_template_is_registered_and_a_report_printed,
    "tune.md": candidates_are_those_of_the_page,
    "warm_start.md": warm_start_is_kept_at_home,
}


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.usefixtures("dropped_backends_go")
@pytest.mark.filterwarnings("ignore:.* asks for CUDA graphs, and the module is not on a GPU")  # it may be read on a CPU
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = Path(__file__).parent / f"code_of_{page}"  # a pass is known to torch's cache by its source
    namespace, own_templates = prepared(page), set(templates.names())
    dynamo = torch._dynamo.config.get_config_copy()
    try:
        for block in blocks(page, "python"):
            code = compile(block["code"], str(source), "exec")
            if not block["mark"]:
                exec(code, namespace)
        if page in LEFT_BEHIND:
            LEFT_BEHIND[page](SimpleNamespace(**namespace, printed=capsys.readouterr().out))
    finally:
        for name in set(templates.names()) - own_templates:
            templates.unregister(name)
        now = torch._dynamo.config.get_config_copy()
        torch._dynamo.config.load_config({name: value for name, value in dynamo.items() if now[name] != value})
        torch._dynamo.reset()


def test_the_page_of_settings_names_every_argument_of_the_callback_and_its_default():
    section = PAGES["settings.md"].read_text().partition("\n## The callback's arguments\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\S+) \|", section, re.MULTILINE)
    found = {name: default.strip("`") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    arguments = inspect.signature(InductorCompile).parameters.values()
    assert found == {a.name: "none" if a.default == () else repr(a.default).replace("'", '"') for a in arguments}


def test_few_blocks_are_not_run():
    marked = {page: sum(bool(block["mark"]) for block in blocks(page, "python")) for page in WITH_CODE}
    assert {page for page, count in marked.items() if count} <= {"many_gpus.md"}


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


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return capsys.readouterr().out


def test_commands_name_files_targets_and_options_that_there_are(capsys):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed = {"tensorboard", "compile-callbacks"}
    seen = set()
    for page, command in commands():
        program, *arguments = shlex.split(command, comments=True)
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
            assert all(f'"{option}"' in known for option in options), (page, command)
        elif program == "compile-callbacks":
            if arguments[0] != "COMMAND":
                known = help_of(arguments[0], capsys)
                assert all(option in known for option in options), (page, command)
        elif program == "pip":
            what, _, extra = arguments[1].partition("[")
            assert (arguments[0], what) == ("install", "."), (page, command)
            assert not extra or f"\n{extra.removesuffix(']')} = [" in (ROOT / "pyproject.toml").read_text(), (
                page,
                command,
            )
        else:
            assert program in installed, (page, command)
    assert seen == {"make", "python", "compile-callbacks", "pip", "tensorboard"}


# ------------------------------------------------------------------------------------------ tables, data and links

# A row without a figure is left out of a table: this has one for each.
EVERY_FIGURE = PhaseReport(
    break_even_steps=1.0,
    seconds_saved=1.0,
    eager_peak_memory_mb=1.0,
    peak_memory_mb=1.0,
    folded_mb=1.0,
    weight_refreshes=1,
    verified="equal",
    max_abs_error=0.0,
    skipped_passes=1,
)


def test_the_page_of_settings_names_every_template():
    section = PAGES["settings.md"].read_text().partition("\n## Templates\n")[2].partition("\n## ")[0]
    rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
    assert list(rows) == templates.names()
    for name, row in rows.items():
        template = templates.get(name)
        assert all(f"`{option}`" in row for option in template.options)
        assert template.mode is None or f"mode `{template.mode}`" in row


def test_the_page_of_backends_has_the_table_of_states():
    (table,) = blocks("backend.md", "text")
    assert table["code"].splitlines() == lifecycle.table()


def test_the_reference_has_every_public_name():
    listed = re.findall(r"^::: ([\w.]+)$", PAGES["api.md"].read_text(), re.MULTILINE)
    assert set(compile_callbacks.__all__) <= {name.rpartition(".")[2] for name in listed}


def test_the_page_of_the_report_explains_every_row():
    labels = [label for label, *_ in labels_and_cells([EVERY_FIGURE])]
    rows = [line.split("|")[1] for line in PAGES["report.md"].read_text().splitlines() if line.startswith("| ")]
    explained = {label.strip() for row in rows for label in row.split(",")}
    assert "skipped passes" in labels
    assert set(labels) <= explained


def test_the_page_of_benchmarks_names_every_script():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert len(scripts) > 1
    assert {script for script in scripts if f"| `{script}` |" not in PAGES["benchmarks.md"].read_text()} == set()


@pytest.mark.parametrize("command", ["doctor", "modes", "bench", "report"])
def test_the_page_of_the_commands_names_every_option(command, capsys):
    (section,) = re.findall(rf"^## {command}\b.*?(?=^## |\Z)", PAGES["cli.md"].read_text(), re.DOTALL | re.MULTILINE)
    options = set(re.findall(r"--[a-z-]+", help_of(command, capsys))) - {"--help"}
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", section))


def test_pages_show_every_picture_that_is_kept():
    shown = {
        Path(link).name for path in PAGES.values() for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text())
    }
    assert shown == {path.name for path in (DOCS / "images").iterdir()}


def test_yaml_in_the_docs_is_yaml():
    found = [block["code"] for page in PAGES for block in blocks(page, "yaml")]
    assert found
    assert all(yaml.safe_load(code) for code in found)


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES["README.md"].read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
