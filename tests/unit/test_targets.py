"""Which parts of a module are compiled."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from torch import nn

from compile_callbacks.targets.repeated import find_repetitions
from compile_callbacks.targets.resolve import check_target_names, resolve_targets
from tests.support.models import Classifier

WIDTH = 16


def names(module, targets=None):
    return [target.name for target in resolve_targets(module, targets, pl.LightningModule)]


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


def test_the_outermost_repetition_wins():
    inner = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))  # noqa: E731
    assert [list(found) for found in find_repetitions(nn.Sequential(inner(), inner()))] == [["0", "1"]]
    alone = nn.Sequential(inner(), nn.Linear(WIDTH, WIDTH))
    assert [list(found) for found in find_repetitions(alone)] == [["0.0", "0.1"]]


@pytest.mark.parametrize(
    "unlike",
    [
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).bfloat16(), nn.ReLU()),
        lambda: nn.Linear(WIDTH, WIDTH),
    ],
    ids=["shape", "class", "dtype", "a layer"],
)
def test_unlike_blocks_are_not_repeated(unlike):
    module = nn.ModuleList([unlike(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH)])
    with pytest.raises(ValueError, match=r"finds no repeated blocks in ModuleList.*CC120"):
        resolve_targets(module, "repeated", nn.Module)


def test_a_part_named_repeated_is_a_target_in_a_list():
    module = Classifier()
    module.repeated = nn.Linear(2, 2)
    (found,) = resolve_targets(module, check_target_names(["repeated"]), pl.LightningModule)
    assert found.members[0].module is module.repeated
