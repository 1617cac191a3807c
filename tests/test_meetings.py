"""What processes agree on where others are elsewhere, or gone; in one process."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
from against_eager import FLOAT32
from models import Classifier, mlp
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, InductorConfig
from compile_callbacks.compiling import verify
from compile_callbacks.compiling.targets import Target
from compile_callbacks.measuring.events import Owner
from compile_callbacks.processes import ranks
from compile_callbacks.processes.meetings import Meetings, News
from compile_callbacks.processes.ranks import Heard, Ranks
from compile_callbacks.session.session import CompileSession

pytestmark = pytest.mark.newest


class Absent:
    """Ranks of which the other one does not come."""

    rank, size = 0, 2

    def __init__(self, current: bool = True) -> None:
        self.current = current
        self.met = 0

    def meet(self, news=None, *, value=None):
        self.met += 1
        return Heard()

    def close(self):
        self.current = False


@pytest.mark.parametrize(("current", "gathered"), [(True, ()), (False, ["mine"])])
def test_what_is_agreed_on_waits_for_ranks_elsewhere_and_not_for_those_that_are_gone(current, gathered):
    meetings = Meetings()
    meetings._ranks = Absent(current)
    # Nothing: the step does not count. By itself: else the baseline would never end, and nothing be compiled.
    assert meetings.gather("mine") == gathered


def session_of(net: nn.Module) -> CompileSession:
    return CompileSession(net, [Target("net", net)], {"train": None, "infer": InductorConfig()})


def test_what_stays_compiled_after_a_step_that_raised_waits_for_nobody():
    net = mlp().eval()
    session, x = session_of(net), torch.randn(4, 8)
    expected = net(x).detach()
    session.begin()
    session._meetings._ranks = others = Absent()
    session.enter("infer")
    session.step_begins()  # and the user's code raises
    session.end(keep_compiled=True)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected, **FLOAT32)
    assert session._switch.regions("infer")[0].ran
    assert others.met == 0
    session.end()


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_processes_meet_behind_the_last_step_of_inference(stage):
    ours, module = InductorCompile(), Classifier()
    ours._session = session_of(module.net)
    ours._session._meetings._ranks = others = mock.Mock(size=2)
    others.meet_after_steps.return_value = Heard()
    getattr(ours, f"on_{stage}_epoch_end")(mock.Mock(), module)
    others.meet_after_steps.assert_called_once_with(None)


def test_a_difference_that_several_processes_find_is_warned_of_once():
    session = session_of(mlp())
    session._meetings._ranks = Absent()
    (region,) = session._switch.regions("infer")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        region._fallback.say("off by 0.51", "differs-from-eager", subject="difference")
        for subject in ("difference", "another thing"):
            heard = News(warnings=[((Owner("net", "infer"), subject), "off by 0.52 [see docs/troubleshooting.md#x]")])
            session._meetings._hear(Heard(news=[(1, heard)]))
    messages = [str(one.message) for one in caught if issubclass(one.category, CompileWarning)]
    assert [message.split(" [")[0] for message in messages] == ["off by 0.51", "rank 1: off by 0.52"]


@pytest.fixture
def alone():
    """A process group of one, whose collectives wait for a second."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=1)
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("leader_compiles", "seconds"), [(False, 0.2), (True, 1.0)])
def test_a_process_waits_for_its_turn_while_its_leader_compiles_and_not_for_ever(alone, leader_compiles, seconds):
    """Another process compiles all the time; the leader waits for this one, or was killed while it compiled."""
    waiting = Ranks("here")
    if leader_compiles:
        waiting.compile_begins()
    waiting._store.add(f"{waiting._keys}/compiling", 1)
    waiting._store.add(f"{waiting._keys}/compiling/1", 1)
    began = time.monotonic()
    with mock.patch.object(ranks, "_TURN_SECONDS", 0.2):
        waiting.await_turn("net")
    assert seconds < time.monotonic() - began < seconds + 0.7


def test_a_synchronised_batch_norm_is_not_compared_where_other_processes_would_have_to_take_part(monkeypatch):
    net = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    assert verify.why_not_alone(net) is None
    monkeypatch.setattr(verify, "_among_others", lambda: True)
    assert "synchronised" in verify.why_not_alone(net)
    assert verify.why_not_alone(net.eval()) is None  # it uses what it has gathered in training
    assert verify.why_not_alone(mlp()) is None
