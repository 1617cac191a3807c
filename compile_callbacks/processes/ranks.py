"""`Ranks`: the processes of a run, and how they wait for one another without a collective that times out."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from compile_callbacks import _torch

_LONGEST_WAIT = timedelta(days=7)  # of the group; how long a rank really waits: see `Ranks`
_LOOK_AROUND = timedelta(seconds=1)
_COMPILING = "compile_callbacks/compiling"  # in the store: how many ranks compile
_TURN_SECONDS = 5.0  # that a rank whose turn it is may do something else than compile, before others do
_TURN_LOOK_SECONDS = 0.02
_LAST = 2**12 - 1
_INDEX_BITS, _SEGMENT_BITS = 12, 32
_AFTER_ALL = 2**63 - 1  # a place that holds nobody back


@dataclass
class Heard:
    """What the others said at a meeting.

    Attributes:
        news: What ranks told, each with the rank that did.
        values: What each rank gave to agree on, by rank; ``None`` where not all ranks came to the same meeting.
    """

    news: list[tuple[int, Any]] = field(default_factory=list)
    values: list[Any] | None = None


class Ranks:
    """The processes of a run, in a process group of their own.

    Ranks meet before the user's code has them wait for one another, so that a rank which compiles for longer is
    waited for here and not in a collective of the user's, which would time out.

    **Meetings need not match.** A meeting has a place in the order of a run: the stages, in each the backward passes
    that ranks share, and in each of those a count. A rank goes on when none is at an earlier place than its own; one
    that is ahead meets again. So a rank which leaves a meeting out, because its code took another branch or its
    loader has a batch less, is not waited for: it is seen at a later place.

    **Waiting ends.** While any rank compiles, the others wait. While none does, they wait as long as the timeout of
    the user's process group, as they would in a collective of its own; then ranks meet no more, and the run goes on
    to where it would have waited without this class. A rank whose process is gone ends the wait at once.

    A meeting at which nobody has news is one all-reduce of two integers between CPUs.

    Args:
        placement: Ranks of the same placement can use each other's compiled code, from a cache folder on disk.
        on_wait: Called about once a second with the seconds waited, while others compile.

    Raises:
        RuntimeError: The processes do not find each other.
    """

    def __init__(self, placement: str, *, on_wait: Callable[[float], None] = lambda seconds: None) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._on_wait = on_wait
        timeout = _torch.collective_timeout()
        self._patience_seconds = timeout.total_seconds()
        group: Any = distributed.new_group(backend="gloo", timeout=timeout)
        self._store = _torch.default_store()
        self._world = distributed.group.WORLD
        self._compiling = False
        self._stage = self._segment = self._index = 0
        placements: list[Any] = [None] * self.size
        distributed.all_gather_object(placements, f"{socket.gethostname()} {placement}", group=group)
        _torch.set_timeout(group, _LONGEST_WAIT)  # not before all have found each other
        self._group = group
        leaders = [placements.index(where) for where in placements]
        self._turns = f"compile_callbacks/{group.group_name}/{leaders[self.rank]}"
        self.follows = leaders[self.rank] != self.rank
        """Whether a rank of a lower number compiles what this one can take from the cache."""
        self.any_follows = len(set(leaders)) < self.size

    @property
    def current(self) -> bool:
        """Whether the process group is still the one that this was made for, and nobody was lost."""
        return self._group is not None and distributed.is_initialized() and distributed.group.WORLD is self._world

    def compile_begins(self) -> None:
        """This rank compiles: it is waited for until `compile_ends`."""
        if not self._compiling and self._group is not None:
            self._compiling = True
            self._store.add(_COMPILING, 1)

    def compile_ends(self) -> None:
        """This rank compiles no more."""
        if self._compiling:
            self._compiling = False
            with contextlib.suppress(RuntimeError):  # the store's process is gone
                self._store.add(_COMPILING, -1)

    def await_turn(self, what: str) -> None:
        """Wait while the rank that this one follows compiles, until it has; not where it does something else.

        It may be in a collective within what it calls, and wait for this rank there.
        """
        patience_seconds = min(_TURN_SECONDS, self._patience_seconds / 2)
        began = idle_since = told = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            while self._store.add(f"{self._turns}/{what}", 0) == 0:
                now = time.monotonic()
                if self._store.add(_COMPILING, 0) > 0:
                    idle_since = now
                elif now - idle_since > patience_seconds:
                    return
                if now - told > _LOOK_AROUND.total_seconds():
                    told = now
                    self._on_wait(now - began)
                time.sleep(_TURN_LOOK_SECONDS)

    def turn_ends(self, what: str) -> None:
        """Those that follow this rank can take what it compiled from the cache."""
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            self._store.add(f"{self._turns}/{what}", 1)

    def meet(self, news: Any = None, *, value: Any = None) -> Heard:
        """Wait until no rank is at an earlier place.

        Args:
            news: What the others are to know, wherever they are; ``None`` for nothing.
            value: What to agree on; ``None`` for nothing.
        """
        heard = self._meet((self._segment, self._index), news, value)
        self._index = min(self._index + 1, _LAST - 1)
        return heard

    def meet_before_backward(self, news: Any = None) -> Heard:
        """Meet before a backward pass that all ranks share."""
        heard = self._meet((self._segment, _LAST), news)
        self._segment, self._index = self._segment + 1, 0
        return heard

    def meet_at_end_of_stage(self, news: Any = None, *, value: Any = None) -> Heard:
        """Meet at the end of a stage, which all ranks come to."""
        heard = self._meet((2**_SEGMENT_BITS - 1, _LAST), news, value)
        self._stage, self._segment, self._index = self._stage + 1, 0, 0
        return heard

    def leave(self, news: Any = None) -> None:
        """Meet no more.

        Args:
            news: What the others are to hear at their next meeting; ``None`` where they need not know.
        """
        if news is not None and self._group is not None:
            with contextlib.suppress(RuntimeError):  # a rank is gone
                self._exchange(_AFTER_ALL, news, None)
        self._group = None

    def _meet(self, at: tuple[int, int], news: Any, value: Any = None) -> Heard:
        segment, index = at
        place = ((self._stage << _SEGMENT_BITS) + segment << _INDEX_BITS) + index
        heard = Heard()
        try:
            while self._group is not None:
                earliest, said = self._exchange(place, news, value)
                heard.news += [(rank, told) for rank, (_, told, _) in enumerate(said) if told is not None]
                news = None  # all have heard it; a value is for those who are at the same place
                if earliest == place:
                    at_place = [given for where, _, given in said if where == place]
                    heard.values = at_place if len(at_place) == self.size else None
                    return heard
        except RuntimeError:  # a rank is gone
            self._group = None
        return heard

    def _exchange(self, place: int, news: Any, value: Any) -> tuple[int, list[tuple[int, Any, Any]]]:
        told = news is not None or value is not None
        highest = torch.tensor([-place, int(told)])
        self._wait(distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self._group, async_op=True))
        if self._group is None or not int(highest[1]):
            return -int(highest[0]), []
        said: list[Any] = [None] * self.size
        distributed.all_gather_object(said, (place, news, value), group=self._group)
        return -int(highest[0]), said

    def _wait(self, work: Any) -> None:
        began = idle_since = time.monotonic()
        while True:
            try:
                work.wait(_LOOK_AROUND)
                return
            except RuntimeError:
                if work.is_completed():  # it failed
                    raise
            now = time.monotonic()
            if self._store.add(_COMPILING, 0) > 0:
                idle_since = now
                self._on_wait(now - began)
            elif now - idle_since > self._patience_seconds:
                self._group = None
                return
