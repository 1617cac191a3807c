"""`cache_dir`: what one process compiles, the next one loads, also after a move; and the small file of each model."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import tempfile
from unittest import mock

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, compile_phases, restore
from tests.support.models import CLASSES, FEATURES, Classifier, batches_of, fit, loader, seeded, trainer
from tests.support.processes import run_in_new_process

# Both phases. Prediction compiles what validation compiled again, because it runs under inference_mode.
RUN = """
import json, sys, warnings

import torch._inductor.cpp_builder as cpp_builder

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import loader, seeded, trainer

warnings.simplefilter("error", CompileWarning)
built, build = [], cpp_builder.CppBuilder.build


def recorded(self):
    if "preprocess" not in (target := self.get_target_file_path()) and target.endswith((".so", ".o")):
        built.append(target)
    build(self)


cpp_builder.CppBuilder.build = recorded
callback, module = InductorCompile(cache_dir=sys.argv[1], baseline_steps=0), seeded()
trainer(callback, max_epochs=2).fit(module, loader(4), loader(2))
predictions = trainer(callback).predict(module, loader(2, seed=1))
phases = callback.report.train, callback.report.infer
cache = [(phase.cache_hits > 0, phase.diagnostics.cache_misses > 0) for phase in phases]
print(json.dumps([[module.losses, [batch.tolist() for batch in predictions]], built, cache]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_also_after_the_folder_moved(tmp_path):
    def run(folder):
        # With one thread, this process builds all libraries, and records them.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torchs own"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return json.loads(run_in_new_process(RUN, folder, environment=environment).splitlines()[-1])

    results, built, cache = run(tmp_path / "first")
    assert built
    assert [misses for _, misses in cache] == [True, True]
    shutil.move(tmp_path / "first", tmp_path / "moved")
    assert run(tmp_path / "moved") == [results, [], [[True, False], [True, False]]]
    assert not [path for path in (tmp_path / "torchs own").rglob("*") if path.is_file()]


# ------------------------------------------------------------------------------------------ the folder


def variables():
    return [os.environ.get(variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]


def cached(folder):
    return compile_phases(nn.Linear(FEATURES, CLASSES), cache_dir=folder)


@pytest.mark.all_versions
@pytest.mark.parametrize("restores", [True, False])
def test_compile_phases_uses_the_folder_until_restore_or_until_the_module_is_deleted(restores, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = tmp_path / "kept"
    module = cached(folder)
    assert variables() == [str(folder / name) for name in ("inductor", "triton")]
    assert folder.stat().st_mode & 0o777 == 0o700
    if restores:
        restore(module)
        assert variables() == ["/somewhere", None]
    del module
    gc.collect()
    assert variables() == ["/somewhere", None]


root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.all_versions
@pytest.mark.usefixtures("captured_graph")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: folder.chmod(0o777), "chmod go-w"),
        (lambda folder: (folder / "triton").mkdir() or (folder / "triton").chmod(0o777), "chmod go-w"),
        pytest.param(lambda folder: os.chown(folder, 12345, 12345), r"another user \(12345\)", marks=root_only),
        (lambda folder: (folder / "inductor").symlink_to(folder.parent), ""),
        (lambda folder: (folder / "inductor").touch(), ""),
    ],
)
def test_a_folder_that_cannot_be_used_costs_the_cache_and_one_warning(tmp_path, spoil, said):
    spoil(tmp_path)
    before, found = variables(), []
    callback, module = InductorCompile("default", None, cache_dir=tmp_path, baseline_steps=0, verify="off"), seeded()
    for caught in (pytest.warns(CompileWarning, match=f"is not used.*{said}"), contextlib.nullcontext()):
        with caught:
            trainer(callback, LambdaCallback(on_train_end=lambda *_: found.append(variables()))).fit(module, loader(2))
    assert found == [before, before]
    assert callback.report.train.graphs == 1


def test_a_folder_that_cannot_be_written_or_has_a_space_is_not_used(tmp_path, monkeypatch):
    before = variables()
    with pytest.warns(CompileWarning, match="is not used.*without quotes.*CC401"):
        restore(cached(tmp_path / "My Drive"))
    with pytest.warns(CompileWarning, match="is not used.*CC401"):
        restore(cached(tmp_path / ("long" * 99)))
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.warns(CompileWarning, match="is not used.*Read-only.*CC401"):
        restore(cached(tmp_path / "kept"))
    assert variables() == before


# `FEATURES` columns of a batch norm: Inductor measures several configurations of the kernel. The first run starts the
# compile workers.
AUTOTUNED = """
import sys

from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from compile_callbacks import InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, loader, trainer

measured, bench = [], CachingAutotuner.bench
CachingAutotuner.bench = lambda self, *args, **kwargs: measured.append(folder) or bench(self, *args, **kwargs)
for width, folder in ((256, None), (512, sys.argv[1])):
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, CLASSES))
    callback = InductorCompile("default", None, cache_dir=folder, baseline_steps=0, verify="off")
    trainer(callback, accelerator="gpu", devices=1).fit(Classifier(net), loader(3, batch_size=1024))
print(measured.count(sys.argv[1]))
"""


@pytest.mark.all_versions
@pytest.mark.gpu
def test_compile_workers_that_started_earlier_use_the_folder_and_a_second_process_measures_no_kernels(tmp_path):
    first, second = (int(run_in_new_process(AUTOTUNED, tmp_path).splitlines()[-1]) for _ in range(2))
    assert first > second == 0
    assert list((tmp_path / "triton").rglob("*.cubin"))


# ------------------------------------------------------------------------------------------ the file of a model


class Unknown(nn.Linear):
    """Cannot be described."""

    def extra_repr(self):
        return str(1 / 0)


@pytest.mark.usefixtures("captured_graph")
@pytest.mark.filterwarnings("ignore:cache_dir has no effect")  # on captured graphs
def test_each_structure_has_a_file_whatever_its_values_are(tmp_path):
    layer, other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    structures = [(layer, layer), (layer, other), (layer,), (layer, nn.Dropout(0.1)), (layer, nn.Dropout(0.2))]
    structures += [(nn.Linear(FEATURES, FEATURES, bias=False),), (Unknown(FEATURES, FEATURES),)]
    for layers in (*structures, (other, layer), (other,)):
        callback = InductorCompile("default", None, cache_dir=tmp_path, baseline_steps=3, verify="off")
        make = lambda layers=layers: Classifier(nn.Sequential(*layers))  # noqa: E731
        fit(callback, make=make, train=batches_of(4, 5, 6, 7), validation=None)
    files = list(tmp_path.glob("model-*.json"))
    assert len(files) == len(structures)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
