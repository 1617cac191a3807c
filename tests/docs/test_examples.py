"""Every example is listed and run in CI, and the notebook's cells run and do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported
pytest.importorskip("matplotlib")


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_the_notebook_runs_and_contains_the_outputs_of_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    recorded = [output for cell in cells for output in cell["outputs"]]
    assert any("torch.compile report" in "".join(output.get("text", "")) for output in recorded)
    assert any("image/png" in output.get("data", {}) for output in recorded)
    assert all(output.get("name") != "stderr" for output in recorded)
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        exec(compile(source, f"quickstart.ipynb cell {number}", "exec"), namespace)
    report = namespace["report"]
    assert float(namespace["trainer"].callback_metrics["accuracy"]) > 0.85
    assert (report.train.graphs, report.infer.graphs) == (1, 1)
    assert (report.train.fallbacks, report.infer.fallbacks) == (0, 0)
    assert (report.train.verified, report.infer.verified) == ("equal 1", "equal 1")
    assert len(report.plot().axes) == 4
    assert "torch.compile report" in capsys.readouterr().out  # its rows depend on how busy the machine is
