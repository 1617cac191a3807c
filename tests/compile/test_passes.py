"""`GraphPass`: what it is told, the order of several, and what the compile cache knows it by."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from compile_callbacks import GraphPass, graph_pass
from compile_callbacks.passes.manager import PassManager, pass_options

pytestmark = pytest.mark.all_versions


class Recorder(GraphPass):
    """Writes down what it is told; never cached, so that it always runs."""

    def __init__(self, name="", log=None):
        self.log = [] if log is None else log
        self.label = name

    def __call__(self, graph, is_inference):
        self.log.append((self.label, is_inference, self.phase))

    def uuid(self):
        return None


class Scale(GraphPass):
    """Multiplies by another number than the model says."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], self.factor)


def compiled(function, **options):
    return torch.compile(function, options=options)


@pytest.mark.skipif(
    not hasattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="torch < 2.13"
)
def test_torchs_own_inference_aware_pass_is_told_too():
    seen = []

    class Own(torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph, is_inference):
            seen.append(is_inference)

        def uuid(self):
            return None

    with torch.no_grad():
        compiled(lambda x: x * 5, **pass_options((Own(),), "infer"))(torch.ones(3))
    assert seen == [True]


def test_uuid_covers_arguments_source_and_hook():
    assert Scale(2).uuid() == Scale(2).uuid()
    assert Scale(2).uuid() != Scale(3).uuid()
    assert Scale(2).uuid() != Scale(2.0).uuid()

    def body(graph, is_inference):
        pass

    def other(graph, is_inference):
        graph.lint()

    assert graph_pass(body).uuid() == graph_pass(body).uuid()
    assert graph_pass(body).uuid() != graph_pass(other).uuid()
    assert graph_pass(body).uuid() != graph_pass(hook="post_grad_pre")(body).uuid()


def test_uuid_tells_two_lambdas_of_a_line_apart():
    passes = [graph_pass(f) for f in (lambda graph, is_inference: graph.lint(), lambda graph, is_inference: None)]
    assert passes[0].uuid() != passes[1].uuid()


def test_uuid_covers_the_contents_of_a_tensor():
    assert Scale(torch.ones(3)).uuid() == Scale(torch.ones(3)).uuid()
    assert len({Scale(x).uuid() for x in (torch.ones(3), torch.zeros(3), torch.ones(3, 1), torch.tensor(1.0))}) == 4
    assert Scale(torch.ones(2**20)).uuid() is None


def test_uuid_keeps_to_the_arguments_as_they_were_given():
    factors = [2]
    scale = Scale(factors)
    before = scale.uuid()
    factors.append(3)
    assert scale.uuid() == before != Scale(factors).uuid()


def test_uuid_of_a_sequence_covers_order_and_phase():
    a, b = Scale(2), Scale(3)
    uuids = {
        PassManager((a, b), "post_grad_post", "train").uuid(),
        PassManager((b, a), "post_grad_post", "train").uuid(),
        PassManager((a, b), "post_grad_post", "infer").uuid(),
        PassManager((a, b), "post_grad_pre", "train").uuid(),
    }
    assert len(uuids) == 4
    assert PassManager((a, Scale(object())), "post_grad_post", "train").uuid() is None


def test_copies_are_the_same_pass_and_pickles_keep_the_uuid():
    recorder = Recorder()
    assert copy.deepcopy(recorder) is recorder
    assert pickle.loads(pickle.dumps(Scale(3))).uuid() == Scale(3).uuid()


@pytest.mark.parametrize("function", [3, lambda graph: None, lambda a, b, c: None])
def test_graph_pass_refuses_what_cannot_be_called_with_graph_and_flag(function):
    with pytest.raises(TypeError, match="function="):
        graph_pass(function)


def test_an_unknown_hook_point_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'post_grad_pre'"):
        graph_pass(hook="post_grad_per")(lambda graph, is_inference: None)
    with pytest.raises(ValueError, match=r"Wrong\.hook='never'"):

        class Wrong(GraphPass):
            hook = "never"

            def __call__(self, graph, is_inference):
                pass
