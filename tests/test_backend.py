"""`InductorBackend`: its states, what building does to a module, and what infer takes and gives."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from models import CLASSES, FEATURES, mlp
from torch import nn
from torch._dynamo.callback import callback_handler
from uncached import Uncached

from compile_callbacks import CompileError, CompileWarning, InductorBackend, compile_phases, restore
from compile_callbacks.lifecycle import CALLS, TRANSITIONS, table

RUNS = []


@torch.library.custom_op("compile_callbacks_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Tells real runs, compiled ones among them, from traces."""
    RUNS.append(tuple(x.shape))
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


class Model(nn.Module):
    """Has what inference must leave alone: a dropout, a batch norm, and a buffer that a call replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(mlp(), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=None, more=()):
        assert x.shape[0] != 13, "thirteen, by design"
        self.calls = self.calls + 1
        out = self.net(counted(x))
        for item in more:
            out = out + item["bias"]
        return out if scale is None else out * scale


class Broken(Uncached):
    def __call__(self, graph, is_inference):
        raise ZeroDivisionError("by design")


def batch(size=4):
    return torch.linspace(-1, 1, size * FEATURES).reshape(size, FEATURES)


SAMPLES = [((batch(),), {})]


def eagerly(*args, **kwargs):
    with torch.no_grad():
        return Model().eval()(*args, **kwargs)


def linear():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def looks(module):
    """What a backend must leave a module with."""
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return [set(vars(part)) for part in module.modules()], [part.training for part in module.modules()], weights


@pytest.fixture(autouse=True)
def _backends_go():
    RUNS.clear()
    yield
    if callback_handler.start_callbacks:  # a backend that is active listens; collecting takes a fifth of a second
        gc.collect()


# ---------------------------------------------------------------------------------------------- its states


@pytest.fixture(scope="module")
def saved():
    backend = InductorBackend().build(linear(), SAMPLES)
    state = backend.to_dict()
    backend.deactivate()
    return state


@pytest.fixture
def in_state(saved):
    def make(state):
        if state in ("checkpoint_loaded", "deployed"):
            backend = InductorBackend.from_dict(linear(), saved)
            if state == "deployed":
                backend.deploy("cpu")
            return backend
        backend = InductorBackend()
        if state != "init":
            backend.build(linear(), SAMPLES)
        if state == "inactive":
            backend.deactivate()
        return backend

    return make


CALL = {
    "build": lambda backend: backend.build(linear(), SAMPLES),
    "infer": lambda backend: backend.infer(batch()),
    "deactivate": lambda backend: backend.deactivate(),
    "activate": lambda backend: backend.activate(),
    "deploy": lambda backend: backend.deploy("cpu"),
    "to_dict": lambda backend: backend.to_dict(),
    "key": lambda backend: backend.key(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", TRANSITIONS)
def test_each_call_in_each_state(in_state, state, call):
    backend = in_state(state)
    assert backend.state == state
    if call in TRANSITIONS[state]:
        CALL[call](backend)
        after = TRANSITIONS[state][call]
    else:
        with pytest.raises(RuntimeError) as raised:
            CALL[call](backend)
        said = str(raised.value)
        assert said.startswith(f"InductorBackend: {call}() is not allowed in the state {state!r}")
        assert all(f"{allowed}()" in said for allowed in TRANSITIONS[state])
        after = state
    assert backend.state == after
    assert backend.is_active == (after in ("active", "deployed"))
    assert backend.describe().endswith(after)
    if backend.is_active:
        with torch.no_grad():
            torch.testing.assert_close(backend.infer(batch()), linear()(batch()))


def test_the_states_are_documented_and_there_is_a_test_of_each_call():
    assert all(f"        {line}\n" in InductorBackend.__doc__ for line in table())
    assert set(CALL) == set(CALLS)


def test_a_backend_that_is_not_built_has_no_module_and_no_device():
    backend = InductorBackend("max-autotune-no-cudagraphs", name="scores")
    assert backend.describe() == "scores: no module, max-autotune-no-cudagraphs, no device, init"
    assert (backend.device, backend.name, backend.config.mode) == (None, "scores", "max-autotune-no-cudagraphs")
    assert (backend.report.infer.mode, backend.report.train.mode) == ("max-autotune-no-cudagraphs", "eager")


# ---------------------------------------------------------------------------------------------- build


def test_building_runs_each_sample_once_and_leaves_no_other_trace():
    module = Model()
    module.net[0][1].eval()
    before, generator = looks(module), torch.get_rng_state()
    samples = [((batch(4),), {}), ([batch(6)], {"scale": torch.tensor(2.0)})]
    backend = InductorBackend().build(module, samples, device="cpu")
    assert RUNS == [(4, FEATURES), (6, FEATURES)]
    assert backend.report.infer.verified is None  # a comparison would be a second run
    assert module.calls == 0
    assert not any(part.training for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (backend.device, backend.state) == (torch.device("cpu"), "active")

    graphs = backend.report.infer.graphs
    torch.testing.assert_close(backend.infer(batch(4)), eagerly(batch(4)))
    torch.testing.assert_close(backend.infer(batch(6), scale=torch.tensor(3.0)), eagerly(batch(6)) * 3)
    assert backend.report.infer.graphs == graphs
    assert module.calls == 2

    module.calls.zero_()
    backend.deactivate()
    after = looks(module)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert backend.report.infer.graphs == graphs


def test_a_backend_is_activated_from_torchs_cache():
    backend = InductorBackend().build(Model(), SAMPLES)
    backend.deactivate()
    backend.activate()
    assert RUNS == [(4, FEATURES)] * 2
    assert (backend.report.infer.cache_hits, backend.report.infer.cache_misses) == (1, 0)
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))


@pytest.mark.parametrize(
    ("settings", "samples", "device", "error", "said"),
    [
        ({}, [*SAMPLES, ((batch(13),), {})], "cpu", AssertionError, "thirteen, by design"),
        ({}, [((batch(), 3), {})], "cpu", TypeError, "positional"),
        ({"on_error": "raise"}, SAMPLES, "cpu", CompileError, "by design"),
        ({}, SAMPLES, "meta", ValueError, "device='meta' cannot be used"),
        ({}, SAMPLES, "cuda:99", ValueError, "device='cuda:99' cannot be used"),
        ({}, SAMPLES, "gpu", ValueError, "device='gpu' cannot be used"),
        ({}, SAMPLES, 0, TypeError, "device=0"),
        ({}, [], "cpu", ValueError, "samples is empty"),
    ],
)
def test_a_build_that_fails_leaves_the_module_as_it_was(settings, samples, device, error, said):
    module = Model()
    module.net[0][1].eval()
    before = looks(module)
    broken = settings.get("on_error") == "raise"
    backend = InductorBackend({"passes": (Broken(),)} if broken else "default", **settings)
    with pytest.raises(error, match=said):
        backend.build(module, samples, device)
    after = looks(module)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert (backend.state, backend.device) == ("init", None)
    if not broken:
        torch.testing.assert_close(backend.build(module, SAMPLES).infer(batch()), eagerly(batch()))


def test_a_failure_of_the_compiler_costs_speed():
    backend = InductorBackend({"passes": (Broken(),)})
    with pytest.warns(CompileWarning, match="by design"):
        backend.build(Model(), SAMPLES)
    assert RUNS == [(4, FEATURES)]
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))


@pytest.mark.parametrize(
    ("samples", "error", "said"),
    [
        (None, TypeError, "samples must be a list of pairs"),
        ("ab", TypeError, "samples must be a list of pairs"),
        (iter(SAMPLES), TypeError, "samples must be a list of pairs"),
        ([*SAMPLES, batch()], TypeError, r"samples\[1\] must be a pair"),
        ([(batch(),)], ValueError, r"samples\[0\] .* 1 parts"),
        ([(batch(), {})], TypeError, r"samples\[0\] must begin with a tuple .* not Tensor"),
        ([((batch(),), [])], TypeError, r"samples\[0\] must end with a mapping .* not list"),
        ([((batch(),), {1: 2})], TypeError, r"samples\[0\] has the keyword argument 1"),
    ],
)
def test_wrong_samples_are_refused_by_their_index(samples, error, said):
    with pytest.raises(error, match=said):
        InductorBackend().build(linear(), samples)


def test_a_sample_is_a_copy_of_what_was_given():
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1)

    x = torch.zeros(3)
    backend = InductorBackend().build(Writes(), [((x,), {})])
    assert x.sum() == 0
    torch.testing.assert_close(backend.infer(x), torch.ones(3))
    torch.testing.assert_close(x, torch.ones(3))  # what infer is given is the module's to change, as eagerly
    backend.deactivate()
    backend.activate()
    torch.testing.assert_close(backend.to_dict()["samples"], [[[torch.zeros(3)], {}]])


# ---------------------------------------------------------------------------------------------- infer


def test_infer_takes_tensors_of_any_kind_without_a_new_graph():
    x, kwargs = batch(), {"scale": torch.tensor(2.0), "more": [{"bias": torch.ones(CLASSES)}]}
    backend = InductorBackend().build(Model(), [((x,), kwargs)])
    expected, graphs = eagerly(x, **kwargs), backend.report.infer.graphs
    with torch.enable_grad():
        out = backend.infer(x.clone().requires_grad_(), **kwargs)
        assert not out.requires_grad
        torch.testing.assert_close(out, expected)
    with torch.inference_mode():
        made_there = batch().t().contiguous().t().contiguous()
        out = backend.infer(made_there, scale=torch.tensor(2.0), more=[{"bias": torch.ones(CLASSES)}])
    assert not out.is_inference()
    torch.testing.assert_close(out, expected)
    assert backend.report.infer.graphs == graphs

    with torch.inference_mode():  # its memory does not hold all of its value
        conjugated = torch.complex(batch(), batch()).conj()
    torch.testing.assert_close(InductorBackend().build(Parts(), [((conjugated,), {})]).infer(conjugated), -batch())


class Parts(nn.Module):
    def forward(self, x):
        return x.imag


def test_infer_evaluates_whatever_mode_the_module_was_put_into():
    module = Model()
    backend = InductorBackend().build(module, SAMPLES)
    module.train()
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))
    assert not any(part.training for part in module.modules())
    assert module(batch()).requires_grad  # with grad enabled the module itself runs eagerly
    assert backend.report.infer.graphs == 1


def test_hooks_within_the_module_run():
    seen = []

    def halve(module, args, output):
        seen.append(output.shape[0])
        return output / 2

    module = Model()
    handle = module.net[0][3].register_forward_hook(halve)
    backend = InductorBackend().build(module, SAMPLES)
    assert seen == [4]
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()) / 2)
    handle.remove()
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))
    module.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()) + 1)
    assert seen == [4, 4]


@pytest.mark.parametrize("new_shapes", ["eager", "raise"])
def test_new_shapes_are_those_of_no_sample(new_shapes):
    backend = InductorBackend({"dynamic": False}, new_shapes=new_shapes)
    backend.build(Model(), [((batch(size),), {}) for size in (2, 3)])
    assert backend.report.infer.graphs == 2
    for size in (2, 3):
        torch.testing.assert_close(backend.infer(batch(size)), eagerly(batch(size)))
    if new_shapes == "eager":
        torch.testing.assert_close(backend.infer(batch(5)), eagerly(batch(5)))
    else:
        with pytest.raises(CompileError, match=r"\(5, 8\)"):
            backend.infer(batch(5))
    assert backend.report.infer.graphs == 2


def test_weights_are_baked_in_and_baked_in_anew_when_they_change():
    module = mlp().eval()
    backend = InductorBackend({"freezing": True, "fold_weights": False}).build(module, SAMPLES)
    with torch.no_grad():
        before = module._call_impl(batch())
        variance = module[1].running_var
        variance.data.fill_(100)  # what leaves no trace is not seen, which shows that it is baked in
        torch.testing.assert_close(backend.infer(batch()), before)
        variance.fill_(4)
        torch.testing.assert_close(backend.infer(batch()), module._call_impl(batch()))


def test_passes_are_told_the_phase():
    class Watch(Uncached):
        def __init__(self):
            self.seen = []

        def __call__(self, graph, is_inference):
            self.seen.append((self.phase, is_inference))

    watch = Watch()
    InductorBackend({"passes": (watch,)}).build(linear(), SAMPLES)
    assert watch.seen == [("infer", True)]


def test_cuda_graphs_on_a_cpu_are_warned_about():
    with pytest.warns(CompileWarning, match="not on a GPU"):
        InductorBackend("reduce-overhead").build(linear(), SAMPLES)


# ---------------------------------------------------------------------------------------------- other owners


def test_a_module_that_is_compiled_by_this_library_is_refused():
    module = nn.Sequential(linear())
    for part in (module, module[0]):
        compile_phases(part)
        with pytest.raises(ValueError, match="compiled by this library already"):
            InductorBackend().build(module, SAMPLES)
        restore(part)
    backend = InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match=r"at 'forward'; undo that first: deactivate\(\)"):
        InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match=r"deactivate\(\)"):
        compile_phases(module)
    with pytest.raises(ValueError, match="compiled by this library already"):
        InductorBackend.from_dict(module, backend.to_dict())
    backend.deactivate()
    compile_phases(module)
    with pytest.raises(ValueError, match="compiled by this library already"):
        backend.activate()
    assert backend.state == "inactive"
    restore(module)
    with pytest.raises(ValueError, match=r"what torch\.compile returned"):
        InductorBackend().build(torch.compile(module), SAMPLES)


def test_a_copy_of_the_module_is_an_ordinary_one_and_a_backend_has_none():
    module = Model()
    backend = InductorBackend().build(module, SAMPLES)
    twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for twin in twins:
        twin.net = nn.Identity()
        with torch.no_grad():
            torch.testing.assert_close(twin(batch()), batch())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="to_dict"):
            copied(backend)


def test_a_module_that_cannot_be_moved_back_is_uncompiled_all_the_same(monkeypatch):
    module = linear()
    backend = InductorBackend().build(module, SAMPLES)
    monkeypatch.setattr(module, "to", lambda device: (_ for _ in ()).throw(MemoryError("by design")))
    with pytest.raises(MemoryError, match="by design"):
        backend.deactivate()
    monkeypatch.undo()
    assert backend.state == "inactive"
    assert set(vars(module)) == set(vars(linear()))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"mode": "fast"}, ValueError, "mode='fast'"),
        ({"mode": "defualt"}, ValueError, "did you mean 'default'"),
        ({"mode": 3}, TypeError, "mode=3"),
        ({"mode": None}, ValueError, "mode=None compiles nothing"),
        ({"mode": "eager"}, ValueError, "mode='eager' compiles nothing"),
        ({"mode": {"optoins": {}}}, ValueError, "mode field='optoins'"),
        ({"on_error": "stop"}, ValueError, "on_error='stop'"),
        ({"new_shapes": "no"}, ValueError, "new_shapes='no'"),
        ({"name": 3}, TypeError, "name=3"),
        ({"name": " "}, ValueError, "name=' '"),
        ({"name": "a\nb"}, ValueError, "name="),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, error, said):
    with pytest.raises(error, match=said):
        InductorBackend(**settings)


@pytest.mark.parametrize("module", [None, torch.relu, nn.Linear])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        InductorBackend().build(module, SAMPLES)


def test_a_module_on_several_devices_is_refused():
    module = nn.Sequential(linear(), nn.Linear(CLASSES, 2, device="meta"))
    with pytest.raises(ValueError, match="several devices, cpu, meta"):
        InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match="without values"):
        InductorBackend().build(module[1], SAMPLES)
