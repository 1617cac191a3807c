"""Which parts of a module are compiled."""

from __future__ import annotations

from torch import nn

from compile_callbacks.targets.resolve import check_target_names, resolve_targets
from tests.support.models import Classifier


def names(module, targets):
    return [target.name for target in resolve_targets(module, targets)]


def test_parts_are_named_or_globbed_and_have_methods():
    module = Classifier()
    assert names(module, ["net.[03]"]) == ["net.0", "net.3"]
    assert names(module, ["net.0", "logits"]) == ["net.0", "logits"]
    assert names(module, ["forward"]) == ["forward"]
    assert names(module, ["net.forward"]) == ["net.forward"]


def test_a_module_under_two_names_is_one_target_and_a_part_may_be_named_repeated():
    module = Classifier()
    module.same, module.repeated = module.net, nn.Linear(2, 2)
    assert names(module, ["net", "same"]) == ["net"]
    (found,) = resolve_targets(module, check_target_names(["repeated"]))
    assert found.members[0].module is module.repeated
