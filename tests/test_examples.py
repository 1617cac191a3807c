"""Every example is listed and run in CI, and the notebook's cells run and do what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NAMES = sorted(
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*")
    if path.suffix in (".py", ".ipynb") and ".ipynb_checkpoints" not in path.parts and path.name != "digits.py"
)


def test_every_example_is_listed_with_what_it_teaches_and_its_command():
    rows = re.findall(
        r"^\| \[(.+?)\]\((.+?)\) \| (.+) \| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, *_ in rows) == NAMES
    for name, link, teaches, command in rows:
        assert link == name
        assert len(teaches) > 20
        assert f"examples/{name}" in command


def test_every_example_runs_in_ci():
    assert "make examples" in (ROOT / ".ci" / "run").read_text()
    run = re.search(r"^EXAMPLES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert run is not None
    names = [name.removesuffix("/main.py").removesuffix(".py") for name in NAMES if name.endswith(".py")]
    assert sorted(run[1].split()) == sorted(names)


def test_short_examples_say_what_they_teach_and_how_to_run_them():
    for name in NAMES:
        text = (EXAMPLES / name).read_text()
        if name.endswith(".py") and "resnet" not in name:
            assert len(text.splitlines()) < 120, name
            docstring = text.split('"""')[1]
            assert "What it teaches" in docstring, name
            assert f"python examples/{name}" in docstring, name


def test_the_notebook_runs_and_keeps_no_outputs(capsys):
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        exec(compile(source, f"quickstart.ipynb cell {number}", "exec"), namespace)
    report = namespace["report"]
    assert float(namespace["trainer"].callback_metrics["accuracy"]) > 0.85
    assert (report.train.graphs, report.infer.graphs) == (1, 1)
    assert (report.train.fallbacks, report.infer.fallbacks) == (0, 0)
    assert (report.train.verified, report.infer.verified) == ("equal", "equal")
    assert len(report.plot().axes) == 2
    assert "speedup" in capsys.readouterr().out
