"""`GraphPass`: what it is told, the order of several, and what the compile cache knows it by."""

from __future__ import annotations

import copy
import pickle
import runpy
import textwrap

import pytest
import torch
from processes import run_in_new_process
from torch._inductor.custom_graph_pass import CustomGraphPass

from compile_callbacks import GraphPass, GraphPassError, graph_pass
from compile_callbacks.passes import PassSequence, pass_options


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


def test_pass_handed_straight_to_torch_is_told_inference_from_training():
    recorder = Recorder()
    function = compiled(lambda x: (x * 2).sin().sum(), post_grad_custom_post_pass=recorder)
    with torch.no_grad():
        function(torch.ones(3))
    assert recorder.log == [("", True, None)]
    recorder.log.clear()
    function(torch.ones(3, requires_grad=True)).backward()
    assert recorder.log == [("", False, None), ("", False, None)]  # forward and backward


def test_passes_run_in_the_order_given():
    log: list = []
    passes = (Recorder("first", log), Recorder("second", log))
    with torch.no_grad():
        compiled(lambda x: x * 2, **pass_options(passes, "infer"))(torch.ones(3))
    assert log == [("first", True, "infer"), ("second", True, "infer")]


def test_pass_runs_at_the_hook_point_it_names():
    seen = {}

    @graph_pass(hook="post_grad_pre")
    def early(graph, is_inference):
        seen["pre"] = True

    @graph_pass
    def late(graph, is_inference):
        seen["post"] = "pre" in seen

    options = pass_options((late, early), "train")
    assert sorted(options) == ["post_grad_custom_post_pass", "post_grad_custom_pre_pass"]
    with torch.no_grad():
        compiled(lambda x: x * 3, **options)(torch.ones(3))
    assert seen == {"pre": True, "post": True}


def test_torchs_own_pass_is_taken_as_it_is():
    class Own(CustomGraphPass):
        calls = 0

        def __call__(self, graph):
            Own.calls += 1

        def uuid(self):
            return None

    with torch.no_grad():
        compiled(lambda x: x * 5, **pass_options((Own(), Recorder()), "infer"))(torch.ones(3))
    assert Own.calls == 1


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


def test_instances_with_other_arguments_do_not_share_cached_graphs():
    for factor in (10, 100):
        torch._dynamo.reset()
        function = compiled(lambda x: x * 2, post_grad_custom_post_pass=Scale(factor))
        assert function(torch.ones(1)).item() == factor


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


def test_uuid_covers_what_a_function_closes_over():
    def make(factor):
        @graph_pass
        def scale(graph, is_inference):
            print(factor)

        return scale

    assert make(2).uuid() == make(2).uuid()
    assert make(2).uuid() != make(3).uuid()
    assert make(object()).uuid() is None


def test_uuid_tells_two_lambdas_of_a_line_apart():
    passes = [graph_pass(f) for f in (lambda graph, is_inference: graph.lint(), lambda graph, is_inference: None)]
    assert passes[0].uuid() != passes[1].uuid()


def test_uuid_covers_the_contents_of_a_tensor():
    assert Scale(torch.ones(3)).uuid() == Scale(torch.ones(3)).uuid()
    assert len({Scale(x).uuid() for x in (torch.ones(3), torch.zeros(3), torch.ones(3, 1), torch.tensor(1.0))}) == 4
    assert Scale(torch.ones(2**20)).uuid() is None


def test_uuid_is_none_where_an_argument_cannot_be_described():
    assert Scale(object()).uuid() is None
    assert PassSequence((Scale(2), Scale(object())), "post_grad_post", "train").uuid() is None


def test_uuid_keeps_to_the_arguments_as_they_were_given():
    factors = [2]
    scale = Scale(factors)
    before = scale.uuid()
    factors.append(3)
    assert scale.uuid() == before != Scale(factors).uuid()


def test_uuid_of_a_sequence_covers_order_and_phase():
    a, b = Scale(2), Scale(3)
    uuids = {
        PassSequence((a, b), "post_grad_post", "train").uuid(),
        PassSequence((b, a), "post_grad_post", "train").uuid(),
        PassSequence((a, b), "post_grad_post", "infer").uuid(),
        PassSequence((a, b), "post_grad_pre", "train").uuid(),
    }
    assert len(uuids) == 4


@pytest.mark.newest
def test_uuid_is_the_same_in_another_process(tmp_path, capsys):
    source = textwrap.dedent("""
        import torch
        from compile_callbacks import GraphPass
        class Typed(GraphPass):
            def __init__(self, dtype, names): pass
            def __call__(self, graph, is_inference): pass
        if __name__ == "__main__":
            print(Typed(torch.bfloat16, {"a", "b", "c"}).uuid())
    """)
    script = tmp_path / "typed.py"
    script.write_text(source)
    runpy.run_path(str(script), run_name="__main__")
    here = capsys.readouterr().out.strip()
    assert len(here) == 64
    assert run_in_new_process(source).split()[-1] == here


def test_copies_are_the_same_pass_and_pickles_keep_the_uuid():
    recorder = Recorder()
    assert copy.deepcopy(recorder) is recorder
    assert pickle.loads(pickle.dumps(Scale(3))).uuid() == Scale(3).uuid()


def test_pass_that_raises_is_named_with_its_phase():
    @graph_pass
    def broken(graph, is_inference):
        raise ZeroDivisionError("by design")

    sequence = PassSequence((broken,), "post_grad_post", "infer")
    with pytest.raises(GraphPassError, match=r"'broken' at post_grad_post in the infer phase raised ZeroDivisionError"):
        sequence(torch.fx.Graph(), True)


def test_pass_that_leaves_a_broken_graph_is_named():
    @graph_pass
    def tangle(graph, is_inference):
        x = graph.placeholder("x")
        first, second = graph.call_function(torch.neg, (x,)), graph.call_function(torch.neg, (x,))
        first.args = (second,)

    with pytest.raises(GraphPassError, match=r"'tangle'.*not well formed"):
        PassSequence((tangle,), "post_grad_post", "train")(torch.fx.Graph(), False)


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
