"""A captured graph is described for another process, compiled from the description, and loaded: the same results."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_callbacks import _torch
from compile_callbacks.graphs.requests import CompileRequest

pytestmark = pytest.mark.all_versions


def sent(graph_module, inputs, **settings):
    """The request as the other process gets it."""
    graph = _torch.portable_graphs.portable_graph(graph_module, inputs)
    settings = {"passes": (), "arguments": {"options": {}}, **settings}
    return pickle.loads(CompileRequest(graph=graph, phase="train", **settings).pickled())


class Backend:
    """Compiles each graph from its description."""

    def __init__(self):
        self.is_valid: list[Callable[[Sequence[object]], bool]] = []
        self.requests: list[CompileRequest] = []
        self.inputs: list[Sequence[object]] = []  # of the calls of all graphs

    def __call__(self, graph_module, inputs):
        request = sent(graph_module, inputs)
        self.requests.append(request)
        answer = request.compile()
        self.is_valid.append(_torch.portable_graphs.guard_of(answer.guards, request.graph.symbol_positions))
        loaded = _torch.portable_graphs.load(answer.artifact, {})
        return lambda *inputs: (self.inputs.append(inputs), loaded(*inputs))[1]


class Net(nn.Module):
    """Writes a buffer, and changes an input that is not a leaf behind a graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        x.mul_(2).add_(1)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x.sin() + self.mean


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it behind the graph break
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
def test_results_gradients_and_buffers_equal_eager(mode):
    torch.manual_seed(0)
    eager = Net()
    compiled, backend = copy.deepcopy(eager), Backend()
    call = torch.compile(compiled, backend=backend)
    around = contextlib.nullcontext() if mode == "train" else getattr(torch, mode)()
    for _ in range(2):
        x = torch.randn(4, 8)
        with around:
            outputs = [net(x) for net in (eager, call)]
            torch.testing.assert_close(*outputs)
        if mode == "train":
            for output in outputs:
                output.square().mean().backward()
    assert len(backend.requests) == 2
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict())
    for weight, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


def test_symbolic_sizes_and_guards():
    backend = Backend()
    call = torch.compile(lambda x, y: (torch.cat([x, y]) * 2).sum(1), backend=backend, dynamic=True)
    for rows in ((4, 3), (6, 2), (5, 5)):
        x, y = (torch.randn(count, 8) for count in rows)
        torch.testing.assert_close(call(x, y), (torch.cat([x, y]) * 2).sum(1))
    assert len(backend.requests) == 1
    is_valid = _torch.portable_graphs.guard_of("L['t0'] + L['t1'] <= 4096 and 2 <= L['t0']", [0, 3])
    assert is_valid((3, torch.ones(1), 9999, 4))
    assert not is_valid((3, torch.ones(1), 9999, 4096))


def test_guards_are_asked_of_the_symbols_and_not_of_a_constant_integer():
    def summed(x, m):
        z = torch.ones(6) * m
        return (z + 1 if m == 8 else z) + x[:10].sum(0) + x.sum(0)

    backend = Backend()
    call = torch.compile(summed, backend=backend, dynamic=True)
    for rows in (20, 30):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(call(x, 8), summed(x, 8))
    [is_valid] = backend.is_valid
    assert [is_valid(inputs) for inputs in backend.inputs] == [True, True]
    assert not is_valid([9 if isinstance(value, int) and value == 30 else value for value in backend.inputs[1]])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as in a trace
def test_autocast_and_configs_travel():
    backend = Backend()
    net = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16), torch._inductor.config.patch({"cpp.threads": 1}):
        assert torch.compile(net, backend=backend)(torch.randn(2, 8)).dtype == torch.bfloat16
    graph = backend.requests[0].graph
    assert graph.configs["inductor"]["cpp.threads"] == 1
    with torch.autocast("cpu", enabled=False), _torch.portable_graphs.restored(graph):
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.bfloat16)


def test_the_kernels_that_the_user_allows_travel():
    found = []

    def backend(graph_module, inputs):
        found.append(sent(graph_module, inputs).graph)
        return graph_module.forward

    query = torch.ones(1, 2, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):
        torch.backends.mkldnn.set_flags(False)
        torch.compile(lambda q: nn.functional.scaled_dot_product_attention(q, q, q), backend=backend)(query)
    torch.backends.mkldnn.set_flags(True)
    torch.compile(lambda q: q + 1, backend=backend)(query)
    for graph, is_default in zip(found, (False, True), strict=True):
        with _torch.portable_graphs.restored(graph):
            assert torch.backends.cuda.flash_sdp_enabled() == torch.backends.mkldnn.enabled == is_default


def reasons_of(function, *inputs):
    reasons = []

    def backend(graph_module, inputs):
        try:
            with _torch.portable_graphs.restored(sent(graph_module, inputs).graph):
                pass
        except Exception as error:
            reasons.append(str(error))
        return graph_module.forward

    torch.compile(function, backend=backend)(*inputs)
    return reasons


def saves_sines(x):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False, context_fn=contexts)


def test_a_graph_with_a_function_of_the_user_is_not_sent():
    (reason,) = reasons_of(saves_sines, torch.ones(3, requires_grad=True))
    assert "context_fn" in reason


def test_inputs_that_share_memory_do_not_travel():
    x = torch.randn(4, 4)
    assert reasons_of(lambda x, y: x.sin() + y[0, 0], x, x[1:]) == ["two inputs share memory"]
