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


class Model(nn.Module):
    """Has weights to freeze, and optionally a graph break, after which other owners compile the same code object."""

    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 2)
        self.breaks = breaks

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


def samples(*sizes):
    return [torch.ones(size, FEATURES) for size in sizes]


def weight_sized():
    """The tensors in memory that look like a weight, also as a kernel packs it; torch's fake ones take none."""
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.numel() == HIDDEN * FEATURES]


def compiled_code():
    return [o for o in gc.get_objects() if issubclass(type(o), OutputCode)]


class Watch:
    """What compiling left in memory since this was made."""

    def __init__(self):
        gc.collect()
        self._before = {id(o): weakref.ref(o) for o in (*compiled_code(), *weight_sized())}

    def _new(self, found):
        # An id may be given to another object once its first is gone.
        return [weakref.ref(o) for o in found if (seen := self._before.get(id(o))) is None or seen() is not o]

    def code(self):
        return self._new(compiled_code())

    def weights(self):
        return self._new(weight_sized())


def alive(references):
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize(("mode", "breaks"), [("default", True), ("freezing", False)])
def test_deactivate_frees_compiled_code_and_weights(mode, breaks):
    module = Model(breaks)
    watch = Watch()
    backend = InductorBackend(mode).build(module, samples(2, 3))
    code, weights = watch.code(), watch.weights()
    assert alive(code) >= 1 + breaks
    assert alive(weights) >= (mode == "freezing")
    backend.deactivate()
    assert (alive(code), alive(weights)) == (0, 0)
    assert backend.report.infer.graphs >= 1 + breaks


@pytest.mark.all_versions
def test_freed_code_does_not_count_towards_the_recompile_limit(no_codegen):
    module, (x,) = Model(breaks=True), samples(2)
    expected = module.eval()(x)
    backend = InductorBackend().build(module, x)
    for _ in range(9):  # torch's limit is 8
        backend.deactivate()
        backend.activate()
        torch.testing.assert_close(backend.infer(x), expected)
    assert (backend.report.infer.fallbacks, backend.report.infer.recompiles) == (0, 0)


def test_a_backend_that_is_garbage_collected_frees_everything():
    watch = Watch()
    module = Model(breaks=True)
    backend = InductorBackend("freezing").build(module, samples(2))
    code, gone = watch.code(), weakref.ref(module)
    assert alive(code) >= 1
    del backend
    gc.collect()
    assert alive(code) == 0
    assert set(vars(module)) == set(vars(Model()))
    del module
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------------------------------------- on a GPU


WIDTH = 2048
MIB = 2**20


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


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "freezing"])
def test_deactivate_frees_gpu_memory(mode):
    module, x = wide(), torch.randn(1024, WIDTH)
    expected = run_on_gpu(module, x).cpu()
    backend = InductorBackend(mode).build(module, x, device="cuda")
    backend.deactivate()
    before = in_use()  # after a first time: what cuBLAS works in is allocated for good, 32 MiB on a Hopper
    backend.activate()
    assert next(module.parameters()).device == backend.device == torch.device("cuda:0")
    for _ in range(3):  # with CUDA graphs the first call records
        out = backend.infer(x)
        assert out.is_cuda
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)
    del out
    active = in_use()
    backend.deactivate()
    after = in_use()
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert active[0] - before[0] > 40
    assert after[0] - before[0] < 2
    assert after[1] - before[1] < 4  # the allocator reserves pieces of 2 MiB


def run_on_gpu(module, x):
    weights = {name: value.cuda() for name, value in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        return torch.func.functional_call(module, weights, x.cuda())


@pytest.mark.gpu
def test_outputs_of_cuda_graphs_stay_valid_and_a_gpus_backend_is_loaded():
    module, x = wide(), torch.randn(64, WIDTH)
    backend = InductorBackend("reduce-overhead").build(module, x, device="cuda")
    outs = [backend.infer(x * scale) for scale in range(1, 5)]
    expected = [run_on_gpu(module, x * scale) for scale in range(1, 5)]
    torch.testing.assert_close(outs, expected, rtol=1e-3, atol=1e-3)
    state = backend.to_dict()
    assert not any(value.is_cuda for value in state["state_dict"].values())
    backend.deactivate()
    loaded = InductorBackend.from_dict(wide(), state, x)
    loaded.deploy("cuda")
    assert loaded.device == torch.device("cuda:0")
    torch.testing.assert_close(loaded.infer(x), expected[0], rtol=1e-3, atol=1e-3)
