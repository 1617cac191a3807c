"""`Ranks`: the processes of a run, and how they wait for one another without a collective that times out."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
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
_TURN_SECONDS = 5.0  # that a rank whose turn it is may do something else than compile, before others do
_TURN_LOOK_SECONDS = 0.02
_FAREWELL_SECONDS = 5.0  # that a rank which ends the run by an error waits for the others to hear of it
_LAST = 2**12 - 1
_INDEX_BITS, _SEGMENT_BITS = 12, 32
_SEGMENTS_OF_LOADER = 2**24  # more steps than a loader has


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

    **Meetings need not match.** A meeting has a place in the order of a run: the stages, in each the places of steps
    that ranks share (a backward pass, the end of a step of inference), and before each of those a count. A rank goes on
    when none is at an earlier place than its own; one that is ahead meets again. So a rank which leaves a meeting out,
    because its code took another branch or its loader has a batch less, is not waited for: it is seen at a later place.

    **Waiting ends.** While any rank compiles, the others wait. While none does, they wait as long as the timeout of
    the user's process group, as they would in a collective of its own; then ranks meet no more, and the run goes on
    to where it would have waited without this class. A rank whose process is gone, or that has left, ends the wait at
    once.

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
        self._leader = leaders[self.rank]
        # In the store: how many ranks compile, whether each of them does, whose turns are over, and who has left.
        self._keys = f"compile_callbacks/{group.group_name}"
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
            self._count_compiles(1)

    def compile_ends(self) -> None:
        """This rank compiles no more."""
        if self._compiling:
            self._compiling = False
            self._count_compiles(-1)

    def await_turn(self, what: str) -> None:
        """Wait while the rank that this one follows compiles, until it has; not where it does something else.

        It may be in a collective within what it calls, and wait for this rank there, or gone in the middle of a
        compile. What other ranks do meanwhile says nothing of it.
        """
        patience_seconds = min(_TURN_SECONDS, self._patience_seconds / 2)
        began = idle_since = told = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            while self._store.add(f"{self._keys}/turns/{self._leader}/{what}", 0) == 0:
                now = time.monotonic()
                if self._store.add(f"{self._keys}/compiling/{self._leader}", 0) > 0:
                    idle_since = now
                if now - idle_since > patience_seconds or now - began > self._patience_seconds:
                    return
                if now - told > _LOOK_AROUND.total_seconds():
                    told = now
                    self._on_wait(now - began)
                time.sleep(_TURN_LOOK_SECONDS)

    def turn_ends(self, what: str) -> None:
        """Those that follow this rank can take what it compiled from the cache."""
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            self._store.add(f"{self._keys}/turns/{self._leader}/{what}", 1)

    def meet(self, news: Any = None, *, value: Any = None) -> Heard:
        """Wait until no rank is at an earlier place.

        Args:
            news: What the others are to know, wherever they are; ``None`` for nothing.
            value: What to agree on; ``None`` for nothing.
        """
        heard = self._meet((self._segment, self._index), news, value)
        self._index = min(self._index + 1, _LAST - 1)
        return heard

    def meet_in_step(self, news: Any = None) -> Heard:
        """Meet at a place of a step that all ranks come to: before a backward pass, at the end of one without."""
        heard = self._meet((self._segment, _LAST), news)
        self._segment, self._index = self._segment + 1, 0
        return heard

    def loader_begins(self, number: int) -> None:
        """Steps of a stage's loader begin, of which ranks may have unequally many: what follows is at equal places."""
        self._segment = max(self._segment, number * _SEGMENTS_OF_LOADER)

    def meet_after_loader(self, number: int, news: Any = None) -> Heard:
        """Meet after the last step with a loader."""
        return self._meet(((number + 1) * _SEGMENTS_OF_LOADER - 1, _LAST), news)

    def meet_after_steps(self, news: Any = None) -> Heard:
        """Meet after the last step of a stage, of which ranks may have unequally many."""
        return self._meet((2**_SEGMENT_BITS - 1, 0), news)

    def meet_at_end_of_stage(self, news: Any = None, *, value: Any = None) -> Heard:
        """Meet at the end of a stage, which all ranks come to."""
        heard = self._meet((2**_SEGMENT_BITS - 1, _LAST), news, value)
        self._stage, self._segment, self._index = self._stage + 1, 0, 0
        return heard

    def leave(self, news: Any = None) -> None:
        """Meet no more; the others do not wait for this rank from here on.

        Args:
            news: What they are to hear where they would meet it, which a few seconds are given for; ``None`` where they
                need not know.
        """
        if self._group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            if news is not None:
                self._store.set(f"{self._keys}/farewell/{self.rank}", pickle.dumps(news))
            self._store.add(f"{self._keys}/left", 1)
        self.close()
        if news is not None:  # whoever started the processes may end all of them when the first one ends
            until = time.monotonic() + _FAREWELL_SECONDS
            with contextlib.suppress(RuntimeError):
                while self._store.add(f"{self._keys}/left", 0) < self.size and time.monotonic() < until:
                    time.sleep(_TURN_LOOK_SECONDS)

    def close(self) -> None:
        """The run is over: give back the group, its sockets and its threads."""
        self.compile_ends()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(AssertionError, ValueError):  # the user's code has destroyed all groups
                distributed.destroy_process_group(group)

    def _count_compiles(self, change: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            self._store.add(f"{self._keys}/compiling", change)
            self._store.add(f"{self._keys}/compiling/{self.rank}", change)

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
        except RuntimeError:  # a rank is gone, has left, or does not come
            heard.news += self._farewells()
            self.leave()
        return heard

    def _exchange(self, place: int, news: Any, value: Any) -> tuple[int, list[tuple[int | None, Any, Any]]]:
        told = b"" if news is None and value is None else pickle.dumps((place, news, value))
        highest = torch.tensor([-place, len(told)], device="cpu")
        self._wait(distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self._group, async_op=True))
        earliest, longest = -int(highest[0]), int(highest[1])
        if not longest:
            return earliest, []
        mine = torch.tensor(list(told.ljust(longest, b"\0")), dtype=torch.uint8, device="cpu")
        of_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        # Not `all_gather_object`, which would wait for a rank that leaves in between as long as the group may.
        self._wait(distributed.all_gather(of_ranks, mine, group=self._group, async_op=True))
        return earliest, [
            pickle.loads(bytes(said.tolist())) if int(said[0]) else (None, None, None) for said in of_ranks
        ]

    def _farewells(self) -> list[tuple[int, Any]]:
        """What those said that have left."""
        try:
            keys = {rank: f"{self._keys}/farewell/{rank}" for rank in range(self.size) if rank != self.rank}
            return [
                (rank, pickle.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
            ]
        except RuntimeError:  # the store's process is gone
            return []

    def _wait(self, work: Any) -> None:
        began = idle_since = time.monotonic()
        someone_left = False
        try:
            while True:
                try:
                    work.wait(_LOOK_AROUND)
                    return
                except RuntimeError:
                    if work.is_completed():  # it failed
                        raise
                now = time.monotonic()
                if self._store.add(f"{self._keys}/left", 0) > 0:
                    if someone_left:  # it had a second look's time to come through
                        raise RuntimeError("a rank has left")
                    someone_left = True
                elif self._store.add(f"{self._keys}/compiling", 0) > 0:
                    idle_since = now
                    self._on_wait(now - began)
                elif now - idle_since > self._patience_seconds:
                    raise RuntimeError("a rank does not come")
        finally:
            if not work.is_completed():
                self._abandon()

    def _abandon(self) -> None:
        """Leave the group while something is under way in it.

        A group of gloo's that goes waits for that, and so would the end of the process: it is kept for good.
        """
        with contextlib.suppress(RuntimeError):  # the store's process is gone
            self._store.add(f"{self._keys}/left", 1)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None
