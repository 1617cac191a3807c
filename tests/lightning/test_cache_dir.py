"""`cache_dir`: what one process compiles, the next one loads, also after a move; and the small file of each model."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, compile_phases, restore
from compile_callbacks.cache.folder import ModelRecord
from compile_callbacks.cli.doctor import check_cache_folder
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, seeded, trainer
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
built = []
build = cpp_builder.CppBuilder.build


def recorded(self):
    if "preprocess" not in (target := self.get_target_file_path()) and target.endswith((".so", ".o")):
        built.append(target)
    build(self)


cpp_builder.CppBuilder.build = recorded
callback, module = InductorCompile(cache_dir=sys.argv[1], baseline_steps=0), seeded()
trainer(callback, max_epochs=2).fit(module, loader(4), loader(2))
predictions = torch.cat(trainer(callback).predict(module, loader(2, seed=1)))
report = callback.report
print(json.dumps({
    "results": [module.losses, predictions.tolist()],
    "misses": counters["aot_autograd"]["autograd_cache_miss"] + counters["inductor"]["fxgraph_cache_miss"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "reported": [[phase.cache_hits, phase.diagnostics.cache_misses] for phase in (report.train, report.infer)],
    "built": built,
}))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_also_after_the_folder_moved_and_damage_is_reported(tmp_path):
    def run(folder):
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torchs own"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # this process builds all libraries, and records them
        }
        return json.loads(run_in_new_process(RUN, folder, environment=environment).splitlines()[-1])

    cold = run(tmp_path / "My Drive")
    assert cold["built"]
    assert cold["misses"] > 0
    shutil.move(tmp_path / "My Drive", tmp_path / "moved")
    warm = run(tmp_path / "moved")
    assert (warm["built"], warm["misses"], warm["results"]) == ([], 0, cold["results"])
    assert warm["hits"] > 0
    assert all(hits > 0 and misses == 0 for hits, misses in warm["reported"])
    assert not [path for path in (tmp_path / "torchs own").rglob("*") if path.is_file()]
    for path in (tmp_path / "moved" / "inductor").rglob("*.main.so"):
        path.write_bytes(b"half of a library, because its process was killed")
    with pytest.raises(AssertionError, match=r"If files in cache_dir='.*moved' are damaged, delete the folder"):
        run(tmp_path / "moved")


# ------------------------------------------------------------------------------------------ the folder


def variables():
    return [os.environ.get(variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]


def cached(folder, **settings):
    return compile_phases(nn.Linear(FEATURES, CLASSES), cache_dir=folder, **settings)


@pytest.mark.all_versions
def test_compile_phases_uses_the_folder_until_restore_or_until_the_module_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = tmp_path / "kept"
    module = cached(folder)
    assert variables() == [str(folder / name) for name in ("inductor", "triton")]
    assert folder.stat().st_mode & 0o777 == 0o700
    restore(module)
    assert variables() == ["/somewhere", None]
    module = cached(folder)
    assert variables()[0] == str(folder / "inductor")
    del module
    gc.collect()
    assert variables() == ["/somewhere", None]


def writable(part):
    def open_to_others(folder):
        (folder / part).mkdir(exist_ok=True)
        (folder / part).chmod(0o777)

    return open_to_others


def is_a_file(folder):
    (folder / "inductor").touch()


root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (writable("inductor"), "is not used.*chmod go-w"),
        (writable("triton"), "is not used.*chmod go-w"),
        pytest.param(lambda folder: os.chown(folder, 12345, 12345), r"another user \(12345\)", marks=root_only),
        (lambda folder: (folder / "inductor").symlink_to(folder.parent), "is not used"),
        (is_a_file, "is not used"),
    ],
)
def test_a_folder_that_cannot_be_used_costs_the_cache_only(tmp_path, spoil, said):
    spoil(tmp_path)
    before = variables()
    with pytest.warns(CompileWarning, match=said):
        module = cached(tmp_path)
    assert variables() == before
    restore(module)


def test_a_folder_that_cannot_be_written_is_used_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "inductor").mkdir()
    (tmp_path / "inductor" / "code").touch()
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.warns(CompileWarning, match="cannot be written, so only its present code is used: .*Read-only.*CC401"):
        module = cached(tmp_path)
    copy = Path(variables()[0])
    assert [path.name for path in copy.iterdir()] == ["code"]
    restore(module)
    assert not copy.exists()


def test_a_folder_with_a_space_is_used_through_a_link(tmp_path):
    module = cached(tmp_path / "My Drive")
    link = Path(variables()[0])
    assert link.resolve() == tmp_path / "My Drive" / "inductor"
    assert " " not in str(link)
    restore(module)
    assert not link.exists()


def test_a_user_without_a_home_folder_compiles_without_the_cache(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
    with pytest.warns(CompileWarning, match="cache_dir='~/kept' is not used.*home.*CC401"):
        callback = InductorCompile("default", None, cache_dir="~/kept", baseline_steps=0)
    trainer(callback).fit(seeded(), loader(2))
    assert callback.report.train.graphs == 1


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (pickle.UnpicklingError("truncated"), True),
        (OSError("main.so: file too short"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("this lowering is not there"), False),
    ],
)
def test_only_an_error_of_damaged_files_is_called_damage(tmp_path, monkeypatch, error, is_damage):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", mock.Mock(side_effect=error))
    module = cached(tmp_path)
    with pytest.warns(CompileWarning) as caught:
        module(torch.ones(4, FEATURES))
    restore(module)
    assert ["are damaged" in str(warning.message) for warning in caught] == [is_damage]


def test_a_space_in_torchs_own_folder_is_named_as_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a b"))
    error = subprocess.CalledProcessError(1, "g++ a b/x.cpp", output=b"g++: error: a: No such file")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", mock.Mock(side_effect=error))
    module = cached(None)
    with pytest.warns(CompileWarning, match="error: a: No such file.*a b' contains a space.*set TMPDIR"):
        module(torch.ones(4, FEATURES))
    restore(module)
    assert "set TMPDIR" in check_cache_folder().fix


@pytest.mark.all_versions
@pytest.mark.usefixtures("no_codegen")
def test_a_folder_that_is_refused_costs_one_warning(tmp_path):
    tmp_path.chmod(0o777)
    callback, module = InductorCompile("default", None, cache_dir=tmp_path, baseline_steps=0, verify="off"), seeded()
    with pytest.warns(CompileWarning, match="is not used.*chmod go-w") as caught:
        trainer(callback).fit(module, loader(4))
    trainer(callback).fit(module, loader(4))  # another warning would be an error
    assert [warning.category for warning in caught].count(CompileWarning) == 1
    assert callback.report.train.graphs > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "error", "message"),
    [
        (3, TypeError, "cache_dir=3 must be the path of a folder, not int"),
        (b"kept", TypeError, "cache_dir=b'kept'"),
        ("", ValueError, "'.' is the current folder"),
        (__file__, ValueError, "must be a folder, but is a file"),
    ],
)
def test_a_wrong_folder_is_refused_with_the_argument_and_the_value(folder, error, message):
    with pytest.raises(error, match=message):
        InductorCompile(cache_dir=folder)


@pytest.mark.all_versions
@pytest.mark.gpu
def test_compile_workers_that_started_earlier_use_the_folder(tmp_path):
    for width, folder in ((24, None), (40, tmp_path)):  # the first run starts the workers
        net = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, CLASSES))
        callback = InductorCompile("default", None, baseline_steps=0, verify="off", cache_dir=folder)
        trainer(callback, accelerator="gpu", devices=1).fit(Classifier(net), loader(4))
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
    first, second = (int(run_in_new_process(AUTOTUNED, tmp_path).splitlines()[-1]) for _ in range(2))
    assert first > second == 0


# ------------------------------------------------------------------------------------------ the file of a model

EMPTY = {"version": 1, "winners": {}, "shapes": {}, "compile_seconds": {}}


def test_record_keeps_the_latest_values_in_a_private_file(tmp_path):
    record = ModelRecord(tmp_path / "cache", "abc")
    assert record.load() == EMPTY
    for number in range(60):
        assert record.update("winners", str(number), {}) is None
    record.update("winners", "10", {"candidate": "default"})
    winners = ModelRecord(tmp_path / "cache", "abc").load()["winners"]
    assert list(winners.items()) == [*((str(number), {}) for number in range(11, 60)), ("10", {"candidate": "default"})]
    assert ModelRecord(tmp_path / "cache", "other").load() == EMPTY
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model-abc.json"]
    assert [path.stat().st_mode & 0o777 for path in (record.path, record.path.parent)] == [0o600, 0o700]


DAMAGED = (
    *(
        b"",
        b"null",
        b"[" * 200_000,
        b"\xff\xfe\x00",
        b'{"winners": {"k": {}}}',
        b'{"version": 2, "winners": {"k": {}}}',
    ),
    b'{"version": 1, "winners": null, "shapes": null, "compile_seconds": null}',
    *(b'{"version": 1, "winners": ' + winners for winners in (b'["k"]}', b'{"k": null, "l": "default"}}')),
    b'{"version": 1, "winners": {"k": 1' + b"0" * 9000 + b"}}",
)


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_record_reads_as_an_empty_one_and_can_be_written_again(tmp_path, content):
    record = ModelRecord(tmp_path, "abc")
    record.path.write_bytes(content)
    assert record.load() == EMPTY
    assert record.update("winners", "k", {"candidate": "default"}) is None
    assert record.load()["winners"] == {"k": {"candidate": "default"}}


def test_record_that_cannot_be_read_or_written_costs_the_record_only(tmp_path):
    pipe, folder = (ModelRecord(tmp_path, name) for name in ("pipe", "folder"))
    os.mkfifo(pipe.path)
    folder.path.mkdir()
    assert pipe.load() == folder.load() == EMPTY  # opening a pipe would wait for a writer
    assert "Error" in folder.update("winners", "k", {})
    assert "TypeError" in ModelRecord(tmp_path, "json").update("winners", "k", {"candidate": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-folder.json", "model-pipe.json"]
    (tmp_path / "file").write_text("")
    assert "Error" in ModelRecord(tmp_path / "file", "abc").update("winners", "k", {})


def test_a_folder_that_torch_cannot_create_costs_speed_only(tmp_path, monkeypatch):
    """The reason for the failure is not looked up in the folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inductor"))
    callback = InductorCompile(infer_mode=None, baseline_steps=0, targets=["net"])
    with pytest.warns(CompileWarning, match="runs eagerly in the train phase.*CC301"):
        assert len(fit(callback, train=2, validation=None).losses) == 2
