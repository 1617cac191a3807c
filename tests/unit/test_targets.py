"""Which parts of a module are compiled."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn

from compile_callbacks.targets.resolve import check_target_names, resolve_targets
from tests.support.models import Classifier


def names(module, targets):
    return [target.name for target in resolve_targets(module, targets)]


class Parts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})

    def encode(self, x):
        return self.layers[0](x)


def test_named_globbed_and_methods():
    assert names(Parts(), ["layers.*"]) == ["layers.0", "layers.1"]
    assert names(Parts(), ["heads.a", "encode"]) == ["heads.a", "encode"]
    assert names(Classifier(), ["forward"]) == ["forward"]
    assert names(Classifier(), ["net.forward"]) == ["net.forward"]


def test_a_module_under_two_names_is_one_target():
    module = Classifier()
    module.same = module.net
    assert names(module, ["net", "same"]) == ["net"]


def test_a_part_named_repeated_is_a_target_in_a_list():
    module = Classifier()
    module.repeated = nn.Linear(2, 2)
    (found,) = resolve_targets(module, check_target_names(["repeated"]))
    assert found.members[0].module is module.repeated
