"""`Meetings` where the other processes are elsewhere, or gone."""

from __future__ import annotations

import pytest

from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.processes.ranks import Heard

pytestmark = pytest.mark.newest


class Absent:
    """Ranks of which the other one does not come."""

    rank, size = 0, 2

    def __init__(self, current: bool) -> None:
        self.current = current

    def meet(self, news=None, *, value=None):
        return Heard()


@pytest.mark.parametrize(("current", "gathered"), [(True, ()), (False, ["mine"])])
def test_what_is_agreed_on_waits_for_ranks_elsewhere_and_not_for_those_that_are_gone(current, gathered):
    meetings = Meetings()
    meetings._ranks = Absent(current)
    # Nothing: the step does not count. By itself: else the baseline would never end, and nothing be compiled.
    assert meetings.gather("mine") == gathered
