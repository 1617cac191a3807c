"""Code in the docs runs as it stands there, and tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from compile_callbacks import lifecycle, templates
from compile_callbacks.testing import check_pass

DOCS = Path(__file__).parent.parent / "docs"


def run_blocks(page, count):
    """The names that the page's code leaves behind."""
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) == count
    source = Path(__file__).parent / f"code_of_{page}"  # a pass is known to torch's cache by its source
    for block in blocks:
        exec(compile(block, str(source), "exec"), namespace)
    return namespace


def test_the_guide_to_passes_runs():
    namespace = run_blocks("passes.md", 3)
    namespace["test_gelu_is_approximated_in_inference"]()
    result = check_pass(namespace["hard_tanh"], torch.nn.Tanh(), torch.randn(4, 8))
    assert result.changed
    result.assert_close(rtol=0, atol=0.5)


def test_the_page_of_warm_starts_runs():
    callback = run_blocks("warm_start.md", 1)["callback"]
    assert callback.cache_dir == Path.home() / ".cache/my-project/compiled"


def test_the_page_of_tuning_runs():
    callback = run_blocks("tune.md", 1)["callback"]
    assert callback.report.train.mode.startswith("tune(default | reduce-overhead | max-autotune, dynamic=False")


def test_the_page_of_settings_runs_and_names_every_template(capsys):
    try:
        namespace = run_blocks("settings.md", 2)
    finally:
        templates.unregister("no_fusion")
    assert namespace["callback"].report.train.mode == "no_fusion"
    assert "aten" in capsys.readouterr().out
    page = (DOCS / "settings.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == templates.names()
    for name, row in rows.items():
        template = templates.get(name)
        assert all(f"`{option}`" in row for option in template.options)
        assert template.mode is None or f"mode `{template.mode}`" in row
    torch._dynamo.reset()


def test_the_page_on_export_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = run_blocks("export.md", 3)
    assert namespace["outputs"].shape == (2, 3)
    assert namespace["callback"] in namespace["trainer"].callbacks
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.usefixtures("dropped_backends_go")
def test_the_page_of_backends_runs_and_has_the_table_of_states(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = run_blocks("backend.md", 2)
    assert namespace["loaded"].describe() == "features: Sequential, max-autotune-no-cudagraphs, cpu, deployed"
    (table,) = re.findall(r"```text\n(.*?)```", (DOCS / "backend.md").read_text(), re.DOTALL)
    assert table.splitlines() == lifecycle.table()
    printed = capsys.readouterr().out.splitlines()[0]
    assert f"  # {printed}\n" in (DOCS / "backend.md").read_text()
