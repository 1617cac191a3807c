"""`InductorBackend.deactivate` frees its compiled code, its frozen weights and its GPU memory only."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._inductor.output_code import OutputCode

from compile_callbacks import InductorBackend

pytestmark = pytest.mark.usefixtures("dropped_backends_go")

FEATURES, HIDDEN = 8, 13  # no other test has tensors of this size
WIDTH, MIB = 2048, 2**20


class Model(nn.Module):
    """Has weights to freeze, and a graph break, after which other owners compile the same code object."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        torch._dynamo.graph_break()
        return self.last(x)


def compiled_objects():
    """Yield the compiled code in memory, and what looks like a weight, also as a kernel packs it."""
    gc.collect()
    for o in gc.get_objects():
        if issubclass(type(o), OutputCode):
            yield "code", o
        elif type(o) in (torch.Tensor, nn.Parameter) and o.numel() == HIDDEN * FEATURES:
            yield "weight", o


@pytest.mark.parametrize(("mode", "drops"), [("default", False), ("freezing", True)])
def test_deactivate_and_garbage_collection_free_compiled_code_and_weights(mode, drops):
    module = Model()
    before = {id(o): o for _, o in compiled_objects()}  # no other object gets their ids
    backend = InductorBackend(mode).build(module, [torch.ones(size, FEATURES) for size in (2, 3)])
    found = [(kind, weakref.ref(o)) for kind, o in compiled_objects() if id(o) not in before]
    kinds = [kind for kind, _ in found]
    assert kinds.count("code") >= 2
    assert kinds.count("weight") >= (mode == "freezing")
    if drops:
        del backend
        gc.collect()
    else:
        backend.deactivate()
        assert backend.report.infer.graphs >= 2
    assert [kind for kind, reference in found if reference() is not None] == []
    assert set(vars(module)) == set(vars(Model()))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert (gone() is None) == drops  # an inactive backend keeps its module


@pytest.mark.all_versions
def test_freed_code_does_not_count_towards_the_recompile_limit(no_codegen):
    module, x = Model(), torch.ones(2, FEATURES)
    expected = module.eval()(x)
    with torch._dynamo.config.patch(recompile_limit=2):
        backend = InductorBackend().build(module, x)
        for _ in range(3):
            backend.deactivate()
            backend.activate()
            torch.testing.assert_close(backend.infer(x), expected)
    assert (backend.report.infer.fallbacks, backend.report.infer.recompiles) == (0, 0)


def wide():
    """Weights of 48 MiB, activations of 24 MiB for a batch of 1,024."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers)


def in_use():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB


def assert_as_eager(outputs, module, *inputs):
    weights = {name: value.cuda() for name, value in module.state_dict().items()}
    assert all(output.is_cuda for output in outputs)
    with torch.no_grad():
        expected = [torch.func.functional_call(module.eval(), weights, x.cuda()) for x in inputs]
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "freezing"])
def test_deactivate_frees_gpu_memory(mode):
    module, x = wide(), torch.randn(1024, WIDTH)
    backend = InductorBackend(mode).build(module, x, device="cuda")
    assert_as_eager([backend.infer(x)], module, x)
    backend.deactivate()
    before = in_use()  # after a first time: what cuBLAS works in is allocated for good, 32 MiB on a Hopper
    backend.activate()
    assert next(module.parameters()).device == backend.device == torch.device("cuda:0")
    for _ in range(3):  # with CUDA graphs the first call records
        assert_as_eager([backend.infer(x)], wide(), x)
    active = in_use()
    backend.deactivate()
    after = in_use()
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert active[0] - before[0] > 40
    assert after[0] - before[0] < 2
    assert after[1] - before[1] < 4  # the allocator reserves pieces of 2 MiB


@pytest.mark.gpu
def test_outputs_of_cuda_graphs_stay_valid_and_a_gpus_backend_is_loaded():
    module, x = wide(), torch.randn(64, WIDTH)
    backend = InductorBackend("reduce-overhead").build(module, x, device="cuda")
    inputs = [x * scale for scale in range(1, 5)]
    assert_as_eager([backend.infer(each) for each in inputs], wide(), *inputs)
    state = backend.to_dict()
    assert not any(value.is_cuda for value in state["state_dict"].values())
    backend.deactivate()
    loaded = InductorBackend.from_dict(wide(), state, x)
    loaded.deploy("cuda")
    assert loaded.device == torch.device("cuda:0")
    assert_as_eager([loaded.infer(x)], wide(), x)
