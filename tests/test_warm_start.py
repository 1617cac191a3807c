"""`cache_dir`: what one run compiles, the next one loads, in another process with an empty cache of torch's own."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import pytest
import torch
from models import CLASSES, FEATURES, Classifier, loader, mlp, trainer
from processes import run_in_new_process
from torch import nn
from uncached import Uncached

from compile_callbacks import (
    CompileWarning,
    InductorCompile,
    InductorConfig,
    _torch,
    compile_phases,
    report_of,
    restore,
)
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.warm_start.artifact_file import Artifact
from compile_callbacks.warm_start.artifacts import ArtifactStore
from compile_callbacks.warm_start.artifacts_key import artifacts_key
from compile_callbacks.warm_start.libraries import probe_libraries
from compile_callbacks.warm_start.warm_start import STEPS_TO_SETTLE, WarmStart

pytestmark = pytest.mark.newest

# A run of both phases: prediction compiles anew what validation compiled, because it runs under inference_mode.
RUN = """
import json, sys, warnings

import torch
import torch._inductor.cpp_builder as cpp_builder
from torch._dynamo.utils import counters

from compile_callbacks import CompileWarning, InductorCompile
from models import loader, seeded, trainer

warnings.simplefilter("error", CompileWarning)
built = []
build = cpp_builder.CppBuilder.build


def recorded(self):
    if "preprocess" not in (target := self.get_target_file_path()) and target.endswith((".so", ".o")):
        built.append(target)
    build(self)


cpp_builder.CppBuilder.build = recorded
callback = InductorCompile(cache_dir=sys.argv[1], baseline_steps=0)
module = seeded()
trainer(callback, max_epochs=2).fit(module, loader(4), loader(2))
predictions = torch.cat(trainer(callback).predict(module, loader(2, seed=1)))
print(json.dumps({
    "losses": module.losses,
    "predictions": predictions.tolist(),
    "report": callback.report.to_dict(),
    "table": str(callback.report),
    "aot_autograd": counters["aot_autograd"],
    "inductor": counters["inductor"],
    "built": built,
}))
"""


def run_in_a_new_process(tmp_path, cache, kept):
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # what is built is built by this process, and counted
    }
    return json.loads(run_in_new_process(RUN, kept, environment=environment).splitlines()[-1])


def test_a_second_run_on_an_empty_cache_compiles_nothing(tmp_path):
    kept = tmp_path / "kept"
    first = run_in_a_new_process(tmp_path, "first", kept)
    assert first["aot_autograd"]["autograd_cache_miss"] > 0
    assert first["built"]
    assert first["report"]["artifacts"]["loaded_mb"] == 0
    (file,) = (path for path in kept.iterdir() if path.is_file())
    assert file.stat().st_mode & 0o777 == 0o600
    assert first["report"]["artifacts"]["path"] == str(file)
    assert first["report"]["artifacts"]["saved_mb"] == file.stat().st_size / 2**20
    before = file.stat().st_mtime_ns

    second = run_in_a_new_process(tmp_path, "second", kept)
    asked = first["aot_autograd"]["autograd_cache_miss"] + first["aot_autograd"].get("autograd_cache_hit", 0)
    assert second["aot_autograd"]["autograd_cache_hit"] == asked
    assert "autograd_cache_miss" not in second["aot_autograd"]
    assert "fxgraph_cache_miss" not in second["inductor"]
    assert second["built"] == []
    for phase in ("train", "infer"):
        assert first["report"][phase]["cache_misses"] > 0
        assert second["report"][phase]["cache_hits"] >= first["report"][phase]["cache_misses"]
        assert second["report"][phase]["cache_misses"] == 0
        assert second["report"][phase]["folded_mb"] == first["report"][phase]["folded_mb"]
    assert second["losses"] == first["losses"]
    assert second["predictions"] == first["predictions"]
    assert second["report"]["artifacts"]["loaded_mb"] > 0
    assert second["report"]["artifacts"]["saved_mb"] == 0
    assert "MB loaded, 0.0 MB saved" in second["table"]
    assert file.stat().st_mtime_ns > before  # loaded lately: it is not the next to be evicted


def artifacts_of(store_folder):
    (file,) = Path(store_folder).glob("*.artifacts")
    return ArtifactStore(store_folder).load(file.stem)


class Scaled(nn.Module):
    """A graph of its own for each factor: what was recorded once in a process is not recorded again."""

    def __init__(self, factor):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.factor = factor

    def forward(self, x):
        return self.layer(x) * self.factor


def test_each_phase_is_kept_when_it_is_left_and_a_loop_by_hand_at_its_report(tmp_path):
    module = compile_phases(Scaled(1.25), cache_dir=tmp_path / "kept", verify="off")
    assert report_of(module).artifacts["saved_mb"] == 0
    assert not (tmp_path / "kept").exists()
    module(torch.randn(2, FEATURES)).sum().backward()
    report_of(module)
    train = {artifact.place for artifact in artifacts_of(tmp_path / "kept")}
    with torch.no_grad():
        module(torch.randn(2, FEATURES))
    report_of(module)
    both = {artifact.place for artifact in artifacts_of(tmp_path / "kept")}
    assert train < both
    assert {place[0] for place in both} == {"aot_autograd", "inductor", "library"}
    (file,) = (tmp_path / "kept").iterdir()
    before = file.stat().st_mtime_ns
    restore(module)
    assert file.stat().st_mtime_ns == before  # nothing new, nothing written


def test_what_is_compiled_is_kept_within_the_first_epoch(tmp_path):
    written = {}

    class Watching(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            written[batch_idx] = len(list((tmp_path / "kept").glob("*.artifacts")))

    callback = InductorCompile("default", None, baseline_steps=0, verify="off", cache_dir=tmp_path / "kept")
    trainer(callback).fit(Watching(Scaled(1.75)), loader(STEPS_TO_SETTLE + 3))
    # Compiled in batch 0; the callback's hook comes before the module's.
    assert written == {batch: int(batch >= STEPS_TO_SETTLE) for batch in range(STEPS_TO_SETTLE + 3)}


def test_what_compiles_again_and_again_is_not_written_as_often(tmp_path, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    warm_start = WarmStart(tmp_path, {"train": InductorConfig(), "infer": None})
    saved = []

    def save():
        saved.append(seconds[0])
        seconds[0] += 2
        warm_start._quiet_steps = None

    monkeypatch.setattr(warm_start, "save", save)
    for _ in range(100):
        warm_start.step_ends(compiled=True)
        for _ in range(STEPS_TO_SETTLE + 1):
            seconds[0] += 1
            warm_start.step_ends(compiled=False)
    assert saved == [5.0, 211.0, 417.0]


SECOND_IN_ONE_PROCESS = """
import sys

from compile_callbacks import InductorCompile
from models import loader, seeded, trainer

trainer(InductorCompile("default", None, baseline_steps=0)).fit(seeded(), loader(4))
trainer(InductorCompile("default", None, baseline_steps=0)).predict(seeded(), loader(1))
trainer(InductorCompile("default", None, baseline_steps=0, cache_dir=sys.argv[1])).fit(seeded(), loader(4))
"""

OTHERS_BETWEEN = """
import sys

import torch
from torch.compiler._cache import CacheArtifactManager

from compile_callbacks import InductorCompile
from models import Classifier, loader, seeded, trainer


class Other(Classifier):
    def forward(self, x):
        return super().forward(x) * 7


ours = InductorCompile("default", None, baseline_steps=0, cache_dir=sys.argv[1])
module = seeded()
trainer(ours).fit(module, loader(4))
for number in range(3):
    callback = InductorCompile("default", None, baseline_steps=0, cache_dir=sys.argv[1] + f"_other_{number}")
    trainer(callback).fit(seeded(Other), loader(4))
trainer(ours).fit(module, loader(4))
InductorCompile("default", None, cache_dir=sys.argv[1] + "_last")
recorded = [artifact for of_kind in CacheArtifactManager._new_cache_artifacts.values() for artifact in of_kind]
assert len(recorded) <= 2 * len(set(recorded)), "torch's record of artifacts grows with every run"
"""


def test_a_second_run_in_one_process_keeps_what_the_first_compiled(tmp_path):
    def kinds(script, kept):
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache_of_{kept}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        run_in_new_process(script, tmp_path / kept, environment=environment)
        return sorted((artifact.kind, artifact.key) for artifact in artifacts_of(tmp_path / kept))

    alone = "\n".join(line for line in SECOND_IN_ONE_PROCESS.splitlines() if "cache_dir" in line or "import" in line)
    of_one = kinds(alone, "alone")
    assert "library" in {kind for kind, _ in of_one}
    assert set(kinds(SECOND_IN_ONE_PROCESS, "second")) >= set(of_one)
    # What others compile in between is not kept with it.
    between = kinds(OTHERS_BETWEEN, "between")
    assert [kind for kind, _ in between if kind != "library"] == [kind for kind, _ in of_one if kind != "library"]


def test_a_run_that_fails_keeps_what_it_compiled(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError("by design")
            return super().training_step(batch, batch_idx)

    callback = InductorCompile("default", None, baseline_steps=0, verify="off", cache_dir=tmp_path / "kept")
    with pytest.raises(ZeroDivisionError):
        trainer(callback).fit(Failing(Scaled(1.5)), loader(4))
    assert {artifact.kind for artifact in artifacts_of(tmp_path / "kept")} >= {"aot_autograd", "inductor"}
    assert callback.report.artifacts["saved_mb"] > 0


def test_a_file_that_is_not_to_be_used_costs_a_warning(tmp_path):
    settings = {"infer_mode": None, "verify": "off", "cache_dir": tmp_path / "kept"}
    x = torch.randn(2, FEATURES)
    module = compile_phases(Scaled(1.75), **settings)
    module(x)
    restore(module)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    module = Scaled(1.75)
    with pytest.warns(CompileWarning, match="ignored: .*damaged") as caught:
        compile_phases(module, **settings)
    assert len(caught) == 1
    torch.testing.assert_close(module(x), module.layer(x) * 1.75)
    assert report_of(module).artifacts["loaded_mb"] == 0
    restore(module)


def test_a_folder_that_is_refused_is_told_of_once(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        module = compile_phases(Scaled(2.35), infer_mode=None, verify="off", cache_dir=tmp_path / "kept")
        module(torch.randn(2, FEATURES))
        report_of(module)
        restore(module)
    (only,) = [str(warning.message) for warning in caught]
    assert only.startswith("kept compile artifacts are ignored: others than its owner can write to")


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o700)
    module = compile_phases(Scaled(2.25), infer_mode=None, verify="off", cache_dir=tmp_path / "kept")
    (tmp_path / "kept").chmod(0o777)
    module(torch.randn(2, FEATURES))
    with pytest.warns(CompileWarning, match="not kept: others than its owner"):
        report_of(module)
    restore(module)  # and not again
    assert list((tmp_path / "kept").iterdir()) == []


def test_artifacts_that_torch_cannot_take_cost_a_warning(tmp_path, monkeypatch):
    store = ArtifactStore(tmp_path)
    warm = WarmStart(tmp_path, {"train": InductorConfig(), "infer": None})
    module = mlp()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    key = artifacts_key(module, {"train": InductorConfig(), "infer": None}, (), (), torch.device("cpu"))
    store.save(key, [Artifact("of another torch", "k", b"k"), Artifact("library", "ab/kernel.so", b"code")])
    with pytest.warns(CompileWarning, match="could not all be put"):
        warm.begin(module)
    assert (tmp_path / "torch" / "ab" / "kernel.so").read_bytes() == b"code"
    assert warm.report()["loaded_mb"] == len(b"code") / 2**20
    warm.begin(module)  # a second run of the same session loads nothing
    assert warm.report()["loaded_mb"] == len(b"code") / 2**20


def test_the_key_is_of_what_compiled_code_depends_on(monkeypatch):
    configs = {"train": InductorConfig(), "infer": None}
    cpu = torch.device("cpu")
    key = artifacts_key(mlp(), configs, (), (), cpu)
    assert artifacts_key(mlp(), configs, (), (), cpu) == key  # other weights
    assert artifacts_key(mlp(), {**configs, "infer": InductorConfig()}, (), (), cpu) != key
    assert artifacts_key(mlp(), {**configs, "train": InductorConfig(dynamic=True)}, (), (), cpu) != key
    assert artifacts_key(mlp(), configs, (Uncached(),), (), cpu) != key
    assert artifacts_key(mlp(), configs, (), ("net",), cpu) != key
    assert artifacts_key(mlp().double(), configs, (), (), cpu) != key
    assert artifacts_key(nn.Linear(2, 2), configs, (), (), cpu) != key
    assert artifacts_key(mlp(), configs, (), (), torch.device("meta")) != key
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "3.0.0")
        assert artifacts_key(mlp(), configs, (), (), cpu) != key
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert artifacts_key(mlp(), configs, (), (), cpu) != key
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert artifacts_key(mlp(), configs, (), (), cpu) != key


def test_functions_have_keys_of_their_own(tmp_path):
    paths = set()
    for function in (torch.relu, torch.tanh):
        compiled = compile_phases(function, cache_dir=tmp_path)
        paths.add(report_of(compiled).artifacts["path"])
        restore(compiled)
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("rank", "device", "others", "writes"),
    [
        (None, "cpu", [], True),
        (None, "cuda:1", [], True),  # a single process on the second GPU
        ("0", "cpu", [], True),  # torchrun, and no trainer: they do not meet
        ("1", "cpu", [], False),
        ("1", "cuda:1", [], True),
        ("1", "cuda:0", [], False),
        ("0", "cpu", [(0, "own"), (1, "own")], True),
        ("1", "cpu", [(0, "own"), (1, "own")], False),
        ("1", "cuda:3", [(0, "cuda:2"), (1, "own")], True),  # its graphs name cuda:3, and are kept apart
        ("8", "cuda:0", [(0, "own"), (8, "own")], False),  # the first GPU of the second machine
    ],
)
def test_of_ranks_with_the_same_artifacts_the_lowest_keeps_them(monkeypatch, tmp_path, rank, device, others, writes):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("compile_callbacks.warm_start.warm_start.device_of", lambda module: torch.device(device))
    monkeypatch.setattr("compile_callbacks.warm_start.warm_start.artifacts_key", lambda *described: "own")
    monkeypatch.setattr(_torch, "recorded_artifacts", lambda after: ([("inductor", "graph", b"g")], 1))
    warm = WarmStart(tmp_path / "kept", {"train": InductorConfig()})
    warm.begin(mlp(), lambda own: others or [own])
    warm.save()
    assert (tmp_path / "kept").exists() == writes


def test_lazy_modules_are_known_by_their_parts(tmp_path):
    lazy = compile_phases(nn.Sequential(nn.LazyLinear(3)), infer_mode=None, verify="off", cache_dir=tmp_path)
    lazy(torch.randn(2, FEATURES))
    restore(lazy)
    assert artifacts_of(tmp_path)


def test_another_rank_loads_and_does_not_write(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    module = compile_phases(Scaled(2.5), infer_mode=None, verify="off", cache_dir=tmp_path / "kept")
    module(torch.randn(2, FEATURES))
    restore(module)
    assert not (tmp_path / "kept").exists()


def test_of_graphs_that_torch_does_not_cache_the_libraries_are_kept(tmp_path):
    module = compile_phases(Scaled(2.75), infer_mode=None, verify="off", passes=[Uncached()], cache_dir=tmp_path)
    module(torch.randn(2, FEATURES))
    restore(module)
    assert {artifact.kind for artifact in artifacts_of(tmp_path)} == {"library"}


def test_libraries_of_other_programs_in_torchs_folder_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(_torch, "cache_folder", lambda: tmp_path)
    sources = {"cprobe": 'extern "C" void __avx_chk_kernel() {}', "cother": "void kernel() {}", "cfile": None}
    sources |= {"cpackage.wrapper": "// with the weights of a model", "cgraph.main": "void kernel() {}"}
    (tmp_path / "ab").mkdir()
    for name, source in sources.items():
        (tmp_path / "ab" / f"{name}.so").write_bytes(b"library")
        if source is not None:
            (tmp_path / "ab" / f"{name}.cpp").write_text(source)
    (tmp_path / "ab" / "cprobe.so.load_ok").touch()
    assert set(probe_libraries()) == {"ab/cprobe.so", "ab/cprobe.so.load_ok"}


def test_where_there_is_nothing_to_keep_it_is_said(tmp_path):
    module = nn.Linear(FEATURES, CLASSES)  # one call of a library of torch's own
    compile_phases(module, train_mode=None, verify="off", passes=[Uncached()], cache_dir=tmp_path)
    with torch.no_grad():
        module(torch.randn(2, FEATURES))
    with pytest.warns(CompileWarning, match="cache_dir has no effect: torch kept nothing"):
        restore(module)


def test_a_cache_dir_without_compiling_is_said(tmp_path):
    with pytest.warns(CompileWarning, match="cache_dir has no effect"):
        InductorCompile(None, None, cache_dir=tmp_path)
    with pytest.warns(CompileWarning, match="cache_dir has no effect"):
        compiled = compile_phases(torch.relu, train_mode=None, infer_mode=None, cache_dir=tmp_path)
    assert report_of(compiled).artifacts is None
    restore(compiled)


@pytest.mark.parametrize("make", [InductorCompile, lambda **settings: compile_phases(torch.relu, **settings)])
def test_a_cache_dir_that_is_no_folder_is_refused(tmp_path, make):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir=.*is a file"):
        make(cache_dir=tmp_path / "file")
    with pytest.raises(TypeError, match="cache_dir=3"):
        make(cache_dir=3)


def test_a_report_tells_of_artifacts_and_survives_a_checkpoint():
    artifacts = {"path": "kept/1.artifacts", "loaded_mb": 30.25, "saved_mb": 0.0}
    report = CompileReport(artifacts=artifacts)
    assert CompileReport.from_dict(report.to_dict()) == report
    assert "compile artifacts: 30.2 MB loaded, 0.0 MB saved, kept/1.artifacts" in str(report)
    assert "artifacts" not in str(CompileReport())
    assert CompileReport.from_dict({"train": {}, "infer": {}}).artifacts is None  # of an earlier version
