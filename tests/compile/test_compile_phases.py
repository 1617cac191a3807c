"""`compile_phases`: modules and functions in hand-written loops."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import lightning
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from compile_callbacks import CompileWarning, InductorConfig, compile_phases, graph_pass, report_of, restore
from compile_callbacks.passes import RecordGraphs
from tests.cases.test_values import validation
from tests.cases.zoo import blocks
from tests.support.models import CLASSES, FEATURES, FLOAT32, Wrapper, mlp, seeded
from tests.support.passes import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


@pytest.fixture(autouse=True)
def _collect_modules():
    yield
    torch._dynamo.reset()  # of a module that is still compiled
    gc.collect()


GRAPHS = ["000_train_forward_post_grad_post", "001_train_backward_post_grad_post", "002_infer_inference_post_grad_post"]


def trained(module, precision=None, before=lambda model: model, after=lambda model: model):
    """The losses of a loop, and sums of the outputs after each step. Functions compile before and after Fabric."""
    optimizer, fabric = torch.optim.SGD(before(module).parameters(), lr=0.1), None
    if precision is not None:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        module, optimizer = fabric.setup(module, optimizer)
    after(module)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(4):
        x, y = torch.randn(6, FEATURES, generator=generator), torch.randint(CLASSES, (6,), generator=generator)
        loss = nn.functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        fabric.backward(loss) if fabric is not None else loss.backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            losses.append((loss.item(), module(x).sum().item()))
        module.train()
    return losses


@pytest.mark.parametrize(
    ("precision", "compiles", "tolerance"),
    [(None, "before", 1e-4), ("bf16-mixed", "after", 0.02)],
)
def test_a_loop_has_two_phases_and_the_results_of_eager(precision, compiles, tolerance):
    """With Fabric, the module is compiled before `setup`, or the wrapper that `setup` returns is passed."""
    watch, compiled, module = RecordGraphs(), [], seeded(mlp)

    def compile_it(model):
        compiled.append(compile_phases(model, passes=[watch], verify="raise"))
        assert compiled[0] is model
        return model

    losses = trained(module, precision, **{compiles: compile_it})
    torch.testing.assert_close(losses, trained(seeded(mlp), precision), rtol=tolerance, atol=tolerance)
    assert [graph.title for graph in watch.graphs] == GRAPHS
    report = report_of(compiled[0])
    for phase in (report.train, report.infer):
        assert (phase.graphs, phase.verified, phase.compiled_step_ms) == (1, "equal 1", None)
        assert phase.compile_seconds > 0
    assert type(module) is nn.Sequential
    assert set(compiled[0].state_dict()) == set(mlp().state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(ValueError, match="restore got Sequential, which compile_phases did not compile"):
            restore(twin)
        twin.load_state_dict(mlp().state_dict())
    restore(compiled[0])  # test_no_trace.py checks that it leaves nothing behind
    assert "_compiled_call_impl" not in vars(compiled[0])


def test_the_validation_of_distributions_is_off_until_the_last_module_is_restored():
    with validation():
        modules = [compile_phases(mlp()) for _ in range(2)]
        restore(modules[0])
        assert not torch.distributions.Distribution._validate_args
        restore(modules[1])


class Database:
    @property
    def session(self):
        raise ConnectionError("the user's code ran")


def test_properties_of_the_users_objects_are_not_read_and_what_the_user_compiled_in_place_is_kept():
    module = mlp()
    module.database = module[0].database = Database()
    module.compile()
    own = module._compiled_call_impl
    compile_phases(module)
    assert report_of(module).train.graphs == 0
    assert module._compiled_call_impl is not own
    restore(module)
    assert module._compiled_call_impl is own


class Encoder(Wrapper):
    """Its graph breaks, so that Dynamo keeps graphs on the code of this class. Has a method that is a target."""

    def encode(self, x):
        weight = self.net[0].weight
        return self.net(x @ (weight.T @ weight)).sin()

    def forward(self, x):
        x = self.encode(x)
        torch._dynamo.graph_break()
        return x + 1


@pytest.mark.usefixtures("recompiles_at_once")
def test_phases_do_not_share_a_recompile_limit():
    static = {"dynamic": False}
    module = compile_phases(Encoder(), static, static, verify="off")
    with torch._dynamo.config.patch(recompile_limit=3):  # less than the graphs of both phases
        for batch in (2, 3):
            for enabled in (True, False):
                with torch.set_grad_enabled(enabled):
                    module(torch.randn(batch, FEATURES))
    report = report_of(module)
    assert (report.train.graphs, report.infer.graphs) == (4, 4)


def test_autocasts_of_two_dtypes_share_no_cached_graph(compiled):
    for dtype in (torch.bfloat16, torch.float16):  # the graphs differ in the dtype of the autocast alone
        torch._dynamo.reset()
        module = compiled(nn.Linear(FEATURES, CLASSES), verify="off")
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert module(X).dtype == dtype


def test_a_smaller_activation_memory_budget_saves_less_for_backward_and_computes_the_same():
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    net, x, saved = nn.Sequential(nn.Linear(FEATURES, 32), *layers, nn.Linear(32, 3)), torch.randn(64, FEATURES), []
    for budget in (None, 0.5):
        mode = InductorConfig(activation_memory_budget=budget, passes=[Uncached()])  # a cached graph is not counted
        module = compile_phases(copy.deepcopy(net), train_mode=mode)
        found = [torch.autograd.grad(each(x).square().sum(), list(each.parameters())) for each in (module, net)]
        torch.testing.assert_close(*found, **FLOAT32)
        assert torch._functorch.config.activation_memory_budget == 1.0  # the budget is active in our compiles only
        report = report_of(module).train
        assert ("activation_memory_budget=0.5" in str(report.mode)) == (budget == 0.5)
        saved.append(report.diagnostics.saved_for_backward_mib)
    assert saved[0] > saved[1]


@pytest.mark.parametrize(("make", "targets"), [(blocks, ["*"]), (Encoder, ["encode"])])
def test_a_dropped_module_is_freed_and_its_report_stays(make, targets):
    module = compile_phases(make(), targets=targets)
    module(X).sum().backward()
    with torch.no_grad():
        module(X)
    report = report_of(module)
    left = [weakref.ref(value) for value in (module, *module.parameters())]
    del module
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []
    assert report.train.graphs > 0


def test_restore_frees_a_captured_graph_whose_compile_failed():
    def graphs():
        gc.collect()
        return {id(o) for o in gc.get_objects() if issubclass(type(o), torch.fx.GraphModule)}

    before, module = graphs(), compile_phases(mlp(), passes=[graph_pass(lambda graph, is_inference: 1 / 0)])
    with pytest.warns(CompileWarning, match="division by zero"):
        module(X)
    assert graphs() - before
    restore(module)
    assert graphs() - before == set()
