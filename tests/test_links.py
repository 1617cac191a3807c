"""Each warning and error ends with a link to its entry in the docs, and each entry is one of a message."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import get_args

import pytest
import torch

import compile_callbacks
from compile_callbacks import (
    AOTInductorExport,
    CompileReport,
    CompileWarning,
    GraphPass,
    InductorBackend,
    InductorCompile,
    InductorConfig,
    RecordGraphs,
    Tune,
    compile_phases,
    export,
    graph_pass,
    load_exported,
    pattern_pass,
    report_of,
    restore,
    templates,
)
from compile_callbacks.links import TROUBLESHOOTING, Entry, see

pytestmark = pytest.mark.newest

PACKAGE = Path(compile_callbacks.__file__).parent
PAGE = Path(__file__).parent.parent / TROUBLESHOOTING
ENTRIES = set(get_args(Entry))
OWN_ERRORS = {"CompileError"}  # raised at many places, of which each has its own cause
LINKED = re.compile(rf" \[see {re.escape(TROUBLESHOOTING)}#([a-z-]+)\]$")


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def anchor(heading):
    """As GitHub and the site make it of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_each_entry_has_a_heading_and_each_message_heading_is_an_entry():
    messages = PAGE.read_text().partition("\n## What a message says\n")[2]
    headings = [anchor(heading) for heading in re.findall(r"^### (.+)$", messages, re.MULTILINE)]
    assert len(headings) == len(set(headings))
    assert set(headings) == ENTRIES


def test_each_entry_is_used():
    used = {
        node.value
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and (path.name != "links.py" or node.value == "a-setting-is-refused")
    }
    assert used >= ENTRIES


def test_each_warning_and_compile_error_has_a_link():
    found = 0
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in {"warnings.warn", "rank_zero_warn", *OWN_ERRORS}:
                found += 1
                message = node.args[0]
                linked = isinstance(message, ast.Call) and ast.unparse(message.func) == "see"
                assert linked, f"{path.name}:{node.lineno}: {called} without see(message, entry)"
    assert found > 10


def test_the_first_link_stays():
    once = see("it failed", "no-package")
    assert see(once, "a-logger-failed") == once == "it failed [see docs/troubleshooting.md#no-package]"
    assert see("a list [1, 2]", "no-package").endswith("[1, 2] [see docs/troubleshooting.md#no-package]")


def _subclass_with_a_wrong_hook():
    class Wrong(GraphPass):
        hook = "later"

        def __call__(self, graph, is_inference):
            raise NotImplementedError


LINEAR = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("refused", "entry"),
    [
        (lambda: InductorCompile("defualt"), "a-setting-is-refused"),
        (lambda: InductorCompile(infer_mode={"fullgraph": 1}), "a-setting-is-refused"),
        (lambda: InductorConfig(options={"no_option": 1}), "a-setting-is-refused"),
        (lambda: InductorConfig.from_dict({"moed": "default"}), "a-setting-is-refused"),
        (lambda: Tune([]), "a-setting-is-refused"),
        (lambda: Tune.from_dict(3), "a-setting-is-refused"),
        (lambda: compile_phases(3), "a-setting-is-refused"),
        (lambda: compile_phases(LINEAR, train_mode="auto"), "a-setting-is-refused"),
        (lambda: report_of(LINEAR), "a-setting-is-refused"),
        (lambda: restore(LINEAR), "a-setting-is-refused"),
        (lambda: templates.get("frezing"), "a-setting-is-refused"),
        (lambda: templates.register("frezing"), "a-setting-is-refused"),
        (lambda: templates.unregister("aten"), "a-setting-is-refused"),
        (lambda: templates.Template(name="", description="", options={}), "a-setting-is-refused"),
        (_subclass_with_a_wrong_hook, "a-setting-is-refused"),
        (lambda: graph_pass(lambda graph: None), "a-setting-is-refused"),
        (lambda: pattern_pass(1, 2, []), "a-setting-is-refused"),
        (lambda: RecordGraphs(hook="later"), "a-setting-is-refused"),
        (lambda: AOTInductorExport("model.onnx"), "a-setting-is-refused"),
        (lambda: export(LINEAR, torch.ones(1, 2), "model.pt2"), "a-setting-is-refused"),
        (lambda: export(LINEAR, (torch.ones(1, 2),), "model.onnx"), "a-setting-is-refused"),
        (lambda: export(LINEAR, (3,), "model.pt2"), "an-input-is-refused"),
        (lambda: export(LINEAR, (torch.ones(1, 2), torch.ones(1)), "model.pt2"), "an-input-is-refused"),
        (lambda: load_exported(__file__), "a-package-is-refused"),
        (lambda: InductorBackend(name=""), "a-setting-is-refused"),
        (lambda: InductorBackend().build(LINEAR, []), "a-setting-is-refused"),
        (lambda: InductorBackend().build(LINEAR, [((torch.ones(1, 2),), {})], "gpu"), "a-setting-is-refused"),
        (lambda: InductorBackend.from_dict(LINEAR, {}), "a-setting-is-refused"),
        (lambda: InductorBackend().deactivate(), "a-backend-in-another-state"),
        (lambda: CompileReport().plot(), "no-plot"),
    ],
)
def test_a_refusal_ends_with_its_link(refused, entry):
    with pytest.raises((TypeError, ValueError, RuntimeError, ImportError)) as caught:
        refused()
    assert LINKED.search(str(caught.value))[1] == entry


@pytest.mark.parametrize(
    ("warned", "entry"),
    [
        (lambda: InductorCompile({"options": {"freezing": True}}), "freezing-has-no-effect"),
        (lambda: InductorCompile(None, None, keep_compiled=True), "nothing-compiles"),
        (lambda: compile_phases(torch.nn.Linear(2, 2), infer_mode="freezing"), "freezing-has-no-effect"),
    ],
)
def test_a_warning_of_the_settings_names_the_users_line(warned, entry):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        made = warned()
    (warning,) = [w for w in caught if w.category is CompileWarning]
    assert LINKED.search(str(warning.message))[1] == entry
    assert warning.filename == __file__
    if isinstance(made, torch.nn.Module):
        restore(made)
