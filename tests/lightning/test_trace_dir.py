"""``trace_dir``: torch's structured trace of a run, and a script for each difference from eager."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import Classifier, loader, trainer
from tests.support.wrong_passes import WrongForward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def compiled_ids(folder):
    """The compile ids of the trace in a folder, and whether the names of all source files are known."""
    (file,) = folder.glob("dedicated_log_torch_trace_*.log")
    records = [json.loads(line.partition("] ")[2]) for line in file.read_text().splitlines() if line.startswith("V")]
    names = {record["str"][1] for record in records if "str" in record}
    frames = [frame for record in records if "stack" in record for frame in record["stack"]]
    assert {frame["filename"] for frame in frames} <= names
    return {record["frame_id"] for record in records if "frame_id" in record}


def test_each_run_writes_a_trace_of_the_compiles_of_the_process(tmp_path):
    handlers = list(logging.getLogger("torch.__trace").handlers)
    for run in ("first", "second"):
        callback = InductorCompile("default", None, baseline_steps=0, trace_dir=tmp_path / run)
        trainer(callback).fit(Classifier(), loader(2))
        assert compiled_ids(tmp_path / run)
        torch._dynamo.reset()
    assert set(logging.getLogger("torch.__trace").handlers) <= set(handlers)


def test_a_difference_from_eager_is_a_script(tmp_path):
    callback = InductorCompile(
        "default", None, passes=[WrongForward("train")], baseline_steps=0, trace_dir=tmp_path, verify="warn"
    )
    with pytest.warns(CompileWarning, match=r"differs from eager.*repro_net_train_1\.py reproduces it"):
        trainer(callback).fit(Classifier(), loader(2))
    script = tmp_path / "repro_net_train_1.py"
    assert "Target 'net' differs from eager in the train phase: output 0" in script.read_text()
    # Without the wrong pass, the graph is right, and the script ends without an error.
    subprocess.run([sys.executable, script], check=True, env=os.environ, cwd=tmp_path, capture_output=True)


@pytest.mark.parametrize("value", ["", 3, b"trace"])
def test_a_value_that_is_not_a_path_is_refused(value):
    with pytest.raises(TypeError, match=r"trace_dir=.* must be a path"):
        InductorCompile(trace_dir=value)
