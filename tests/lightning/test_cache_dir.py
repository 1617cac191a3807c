"""`cache_dir`: what one process compiles, the next one loads, also after a move."""

from __future__ import annotations

import gc
import json
import os
import shutil
import warnings

import pytest
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, compile_phases, restore
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer
from tests.support.processes import run_in_new_process

# Both phases. Prediction compiles what validation compiled again, because it runs under inference_mode.
RUN = """
import json, sys, warnings

import torch
import torch._inductor.cpp_builder as cpp_builder
from torch._dynamo.utils import counters

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import loader, seeded, trainer

warnings.simplefilter("error", CompileWarning)
folder = sys.argv[1]
built = []
build = cpp_builder.CppBuilder.build


def recorded(self):
    if "preprocess" not in (target := self.get_target_file_path()) and target.endswith((".so", ".o")):
        built.append(target)
    build(self)


cpp_builder.CppBuilder.build = recorded
callback = InductorCompile(cache_dir=folder, baseline_steps=0)
module = seeded()
trainer(callback, max_epochs=2).fit(module, loader(4), loader(2))
predictions = torch.cat(trainer(callback).predict(module, loader(2, seed=1)))
print(json.dumps({
    "losses": module.losses,
    "predictions": predictions.tolist(),
    "misses": counters["aot_autograd"]["autograd_cache_miss"] + counters["inductor"]["fxgraph_cache_miss"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "reported": [
        [phase.cache_hits, phase.diagnostics.cache_misses] for phase in (callback.report.train, callback.report.infer)
    ],
    "built": built,
}))
"""


def run(tmp_path, folder):
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torchs own"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # this process builds all libraries, and records them
    }
    return json.loads(run_in_new_process(RUN, folder, environment=environment).splitlines()[-1])


def assert_same_results(first, second):
    assert second["losses"] == first["losses"]
    assert second["predictions"] == first["predictions"]


@pytest.mark.slow
def test_a_second_process_compiles_nothing_also_after_the_folder_moved(tmp_path):
    cold = run(tmp_path, tmp_path / "kept")
    assert cold["built"]
    assert cold["misses"] > 0
    warm = run(tmp_path, tmp_path / "kept")
    shutil.move(tmp_path / "kept", tmp_path / "moved")
    moved = run(tmp_path, tmp_path / "moved")
    for again in (warm, moved):
        assert again["built"] == []
        assert again["misses"] == 0
        assert again["hits"] > 0
        assert all(hits > 0 and misses == 0 for hits, misses in again["reported"])
        assert_same_results(cold, again)
    assert not [path for path in (tmp_path / "torchs own").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_the_message_about_a_damaged_folder_says_to_delete_it(tmp_path):
    run(tmp_path, tmp_path / "kept")
    for path in (tmp_path / "kept" / "inductor").rglob("*.main.so"):
        path.write_bytes(b"half of a library, because its process was killed")
    with pytest.raises(AssertionError, match=r"If files in cache_dir='.*kept' are damaged, delete the folder"):
        run(tmp_path, tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept")
    assert run(tmp_path, tmp_path / "kept")["built"]


def variables():
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR")


@pytest.mark.all_versions
@pytest.mark.usefixtures("no_codegen")
def test_a_folder_that_is_refused_costs_one_warning(tmp_path):
    tmp_path.chmod(0o777)
    callback = InductorCompile("default", None, cache_dir=tmp_path, baseline_steps=0, verify="off")
    module = seeded()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        for _ in range(2):
            trainer(callback).fit(module, loader(4))
    told = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
    assert ["is not used" in message for message in told] == [True]
    assert callback.report.train.graphs > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all_versions
@pytest.mark.usefixtures("no_codegen")
def test_compile_phases_uses_the_folder_until_restore_or_until_the_module_is_deleted(tmp_path):
    before = variables()
    module = compile_phases(nn.Linear(FEATURES, CLASSES), cache_dir=tmp_path, verify="off")
    assert variables() == (str(tmp_path / "inductor"), str(tmp_path / "triton"))
    restore(module)
    assert variables() == before
    module = compile_phases(nn.Linear(FEATURES, CLASSES), cache_dir=tmp_path, verify="off")
    assert variables() != before
    del module
    gc.collect()
    assert variables() == before


@pytest.mark.all_versions
@pytest.mark.gpu
def test_compile_workers_that_started_earlier_use_the_folder(tmp_path):
    def fit(callback, width):
        net = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, CLASSES))
        trainer(callback, accelerator="gpu", devices=1).fit(Classifier(net), loader(4))

    fit(InductorCompile("default", None, baseline_steps=0, verify="off"), 24)  # starts the workers
    fit(InductorCompile("default", None, baseline_steps=0, verify="off", cache_dir=tmp_path), 40)
    assert list((tmp_path / "triton").rglob("*.cubin"))


# `FEATURES` columns of a batch norm: Inductor measures several configurations of the kernel.
AUTOTUNED = """
import sys

from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from compile_callbacks import InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, loader, trainer

measured = []
bench = CachingAutotuner.bench
CachingAutotuner.bench = lambda self, *args, **kwargs: measured.append(self) or bench(self, *args, **kwargs)
net = nn.Sequential(nn.Linear(FEATURES, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, CLASSES))
callback = InductorCompile("default", None, cache_dir=sys.argv[1], baseline_steps=0, verify="off")
trainer(callback, accelerator="gpu", devices=1).fit(Classifier(net), loader(3, batch_size=1024))
print(len(measured))
"""


@pytest.mark.all_versions
@pytest.mark.gpu
def test_a_second_process_measures_no_configurations_of_kernels(tmp_path):
    assert int(run_in_new_process(AUTOTUNED, tmp_path).splitlines()[-1]) > 0
    assert int(run_in_new_process(AUTOTUNED, tmp_path).splitlines()[-1]) == 0
