"""The mode "fast": its choice, and its static graphs. In the tests with ``as_on_gpu``, a CPU stands in for a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn

from compile_callbacks import InductorBackend, InductorCompile
from tests.cases.case import Case, check, net
from tests.cases.zoo import Calls, smooth
from tests.support.models import CLASSES, FEATURES, Classifier, fit

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

FAST = InductorCompile().arguments.configs["train"]
CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
ALIKE, WHY = {"net": 1.0}, "equal shapes on one GPU"

# The devices of the weights, why they are sharded, and the share of the usual shapes.
CHOICES = [
    ({GPU}, None, ALIKE, WHY),
    ({GPU}, None, {"net": 4 / 6}, WHY),
    ({GPU}, None, {"net": 1.0, "head": 0.6}, "40% of the calls of 'head' have other shapes"),
    ({GPU}, None, {}, "no eager step has shown the shapes"),
    ({GPU}, "they are sharded", ALIKE, "the weights are sharded"),
    ({GPU, OTHER}, None, ALIKE, "the weights are on several devices"),
    ({GPU, CPU}, None, ALIKE, "the weights are on several devices"),
    ({CPU}, None, ALIKE, "the weights are not on a GPU"),
    (set(), None, ALIKE, "the weights are not on a GPU"),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_cuda_graphs_need_one_gpu_and_equal_shapes(choice, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.version, "hip", None)
    *facts, reason = choice
    variant = FAST.variant(*facts)
    assert (variant.reason, variant.static) == (reason, reason == WHY)
    assert variant.config.describe() == ("reduce-overhead" if reason == WHY else "default")


def test_cuda_graphs_need_an_nvidia_gpu_and_the_allocator_of_torch(monkeypatch):
    for module, name, value, reason in (
        (torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync", "the memory allocator is 'cudaMallocAsync'"),
        (torch.version, "hip", "6.4", "the GPU is not from NVIDIA"),
    ):
        monkeypatch.setattr(module, name, value)
        assert FAST.variant({GPU}, None, ALIKE)[-2:] == (False, reason)


def test_cuda_graphs_need_the_main_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with ThreadPoolExecutor() as threads:
        variant = threads.submit(FAST.variant, {GPU}, None, ALIKE).result()
    assert variant[-2:] == (False, "the steps do not run in the main thread")


def test_the_line_without_arguments_says_on_a_cpu_that_it_runs_default(recwarn):
    callback = InductorCompile()
    assert callback.report.train.mode == callback.report.infer.mode == "fast"
    fit(callback, train=20, validation=20)
    for phase, report in callback.report.phases.items():
        assert (report.mode, report.mode_reason) == ("default", "the weights are not on a GPU")
        [line] = [line for line in str(callback.report).splitlines() if line.startswith(phase)]
        assert "; mode default (the weights are not on a GPU)" in line  # advice about slow steps may follow
    warned = [text for warning in recwarn if "[CC" in (text := str(warning.message))]
    assert [text for text in warned if "CC501" not in text] == []  # a tiny net may be slower


def test_a_backend_chooses_by_its_samples():
    backend = InductorBackend("fast", verify="off")
    assert backend.report.infer.mode == "fast"
    backend.build(nn.Linear(FEATURES, CLASSES), torch.ones(4, FEATURES))
    assert backend.config.describe() == backend.report.infer.mode == "default"
    assert backend.report.infer.mode_reason == "the weights are not on a GPU"
    backend.deactivate()


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Let "fast" choose as it does on a GPU, but a config that works on a CPU."""
    chosen = FAST.variant({CPU}, None, {})._replace(static=True, reason=WHY)
    monkeypatch.setattr(type(FAST), "variant", lambda *facts: chosen)


class Counted(Classifier):
    """Computes with a number that changes in each step from the sixth on."""

    def __init__(self):
        super().__init__(Calls(smooth(), lambda net, x: net(x) / net.number))
        self.net.net.number = 1

    def on_train_batch_start(self, batch, batch_idx):
        self.net.net.number += batch_idx > 4


TANH = net(smooth)


def case(name, sizes, graphs, missed, reason=WHY, make=TANH, **more):
    settings = {"train_mode": "fast", "infer_mode": None, "baseline_steps": 5, "verify": "eager"}
    expect = {"train.mode_reason": reason, "train.graphs": graphs, "train.recompiles": more.pop("recompiles", 0)}
    expect |= {"train.diagnostics.eager_calls": {"net": missed}, "train.mode": "default"}
    return Case(name=name, make=make, train=sizes, validation=None, predict=None, callback=settings, expect=expect,
                trainer={"max_epochs": more.pop("epochs", 1)}, **more)  # fmt: skip


CASES = [
    # The other size is a third of the eager calls. It gets a static graph at its eighth call.
    case("two sizes", (4, 4, 3) * 9, 2, 7, recompiles=1),
    case("a smaller last batch", (4,) * 4 + (3,), 2, 7, recompiles=1, epochs=9),
    # One compile for all sizes, as in the mode "default".
    case("three sizes", (4,) * 8 + (3, 2), 2, 8, "the calls have three sets of shapes or more", epochs=6),
    # The second compile makes the number an input of the graph, and the third one has no CUDA graphs.
    case("a number that changes", (4,) * 30, 3, 7, "a graph has a dynamic dimension or number", Counted, recompiles=1),
]


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_graph_has_a_dynamic_dimension_until_the_phase_goes_on_in_default(case):
    check(case)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("call", [2, 3])
def test_a_capture_without_memory_changes_nothing_and_the_phase_goes_on_in_default(call, monkeypatch):
    """The second call of the code warms up, after the comparison, and the third one records. Both write statistics."""
    compile_fx, calls = torch._inductor.compile_fx.compile_fx, []

    def without_memory(*args, **kwargs):
        code = compile_fx(*args, **kwargs)
        if "config_patches" not in kwargs:  # it calls itself
            return code

        def run(*inputs):
            calls.append(code)
            outputs = code(*inputs)
            if len(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return outputs

        return run

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", without_memory)
    check(case("short", (4,) * 20, 2, 1, "the CUDA graphs need more memory than is free", Classifier))
