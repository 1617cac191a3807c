"""`Meetings`: where the ranks of a run meet, and what they tell each other there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compile_callbacks import _torch
from compile_callbacks.measuring.events import Owner
from compile_callbacks.measuring.progress import LINE_SECONDS
from compile_callbacks.processes.ranks import Heard, Ranks

_T = TypeVar("_T")


@dataclass
class News:
    """What a rank has to tell.

    Attributes:
        compiled: It compiled something since it told the last.
        failures: What the compiler failed on, and why.
        warnings: What there is to warn of, by subject: rank zero does it for all.
        fatal: Why the run is to end.
    """

    compiled: bool = False
    failures: list[tuple[Owner, str]] = field(default_factory=list)
    warnings: list[tuple[Hashable, str]] = field(default_factory=list)
    fatal: str | None = None


class Meetings:
    """Has the ranks of a run wait for each other's compiles, and fall back together. Alone it does nothing.

    Ranks meet

    - at the end of the first call of each target in each stage: what is compiled there, forward and backward, is
      compiled on every rank before any of them goes on to a collective, in forward or in backward;
    - before each backward pass whose gradients are reduced: a rank that compiles later, for a new shape, is waited for
      there;
    - at the end of each step of inference, for the same, and after the last one with each loader: DDP sends buffers to
      all ranks before the next one, and what is logged for all ranks is reduced behind the last one;
    - at the end of each stage.

    Outside of steps they do not meet: what one rank alone does there, the others do not wait for.

    Args:
        say: Takes a line of text while others are waited for.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.in_step = False
        """Whether several processes are in a step."""
        self.disturbed = False
        """Whether any rank compiled in the step."""
        self.on_failure: Callable[[Owner, str], None] = lambda owner, reason: None
        """Called on every rank for what failed on any."""
        self.on_warning: Callable[[Hashable, str], object] = lambda subject, message: None
        """Called on rank zero for what another rank would warn of."""
        self.on_fatal: Callable[[str], None] = lambda message: None
        """Called on the other ranks where one is about to end the run; to raise."""
        self.speaks = True
        """Whether this process is the one that warns, logs and keeps files."""
        self._ranks: Ranks | None = None
        self._say = say
        self._said_at_seconds = 0.0
        self._news = News()
        self._met: set[Hashable] = set()
        self._ever_met: set[Hashable] = set()

    # ------------------------------------------------------------------------------------------ a run

    def begin(self, device: torch.device, *, together: bool) -> None:
        """A run begins.

        Args:
            device: Where this rank computes.
            together: Whether all ranks of the process group, if there is one, begin it here: they meet from here on.
        """
        together = together and torch.distributed.is_available() and torch.distributed.is_initialized()
        self.speaks = not together or torch.distributed.get_rank() == 0
        together = together and torch.distributed.get_world_size() > 1
        if self._ranks is not None and not (together and self._ranks.current):
            self._ranks.close()
            self._ranks = None
        if together and self._ranks is None:
            self._ranks = self._joined(f"{device} {_torch.cache_folder()}")

    def end(self) -> None:
        """A run is over, in the middle of a step maybe: what stays compiled is called by each rank for itself."""
        self.in_step = False
        if self._ranks is not None:
            self._ranks.close()

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self._ranks is None else self._ranks.size

    def step_begins(self, loader: int = 0) -> None:
        """A step begins.

        Args:
            loader: The number of its loader among those of the stage.
        """
        self.in_step, self.disturbed = self._ranks is not None, False
        if self._ranks is not None and loader:
            self._ranks.loader_begins(loader)

    def step_ends(self) -> None:
        """A step ends."""
        self.in_step = False

    def before_backward(self) -> None:
        """A backward pass is to follow, at whose end gradients are reduced."""
        self._meet_in_step()

    def after_inference(self) -> None:
        """All of a step has run that has no backward pass."""
        self._meet_in_step()

    def after_loader(self, loader: int) -> None:
        """The last step with a loader is done: what is logged for all ranks is reduced next."""
        if self._ranks is not None:
            self._hear(self._ranks.meet_after_loader(loader, self._told()))

    def after_steps(self) -> None:
        """The last step of a stage is done, and what follows in all ranks may wait for them."""
        if self._ranks is not None:
            self._hear(self._ranks.meet_after_steps(self._told()))

    def gather_at_end_of_stage(self, value: _T) -> Sequence[_T]:
        """A stage ends; gives what each rank gave, nothing where ranks were lost."""
        self.in_step = False
        self._met.clear()
        if self._ranks is None:
            return [value]
        return self._hear(self._ranks.meet_at_end_of_stage(self._told(), value=value)) or ()

    def gather(self, value: _T) -> Sequence[_T]:
        """What each rank gives, by rank; nothing where not all ranks are at the same place of the run.

        Where ranks meet no more, what this one gives: it goes on by itself, and waits for no agreement for good.
        """
        if self._ranks is None:
            return [value]
        given = self._hear(self._ranks.meet(self._told(), value=(value,))) or [None]
        if not self._ranks.current:
            return [value]
        return () if None in given else [of_rank for (of_rank,) in given]

    # ------------------------------------------------------------------------------------------ a call of a target

    def is_first(self, owner: Owner, name: str) -> bool:
        """Whether a call in a step is the first of its target in this stage.

        Args:
            owner: What is compiled.
            name: The target: of repeated blocks the one that is called, which may have to be compiled by itself.
        """
        return self.in_step and (owner, name) not in self._met

    def first_call(self, owner: Owner, name: str, call: Callable[[], _T], *, cached: bool) -> _T:
        """Call a target for the first time in a stage, and meet.

        Where ranks share a cache, the first of them compiles before the others, which find it there.

        Args:
            owner: What is compiled.
            name: The target.
            call: The call.
            cached: Whether what is compiled in it will be in torch's cache on disk.
        """
        assert self._ranks is not None
        met, turn = (owner, name), f"{name} {owner}"
        self._met.add(met)
        in_turn = cached and self._ranks.any_follows and met not in self._ever_met
        self._ever_met.add(met)
        if in_turn and self._ranks.follows:
            self._ranks.await_turn(turn)
        result = call()
        if in_turn and not self._ranks.follows:
            self._ranks.turn_ends(turn)
        self._meet()
        return result

    def forget(self, owner: Owner) -> None:
        """What was compiled is given back: where it is called again, that is a first call again."""
        self._met -= {met for met in self._met if isinstance(met, tuple) and met[0] == owner}

    def compile_begins(self) -> None:
        """This rank compiles: the others wait until `compile_ends`."""
        self._news.compiled = True
        if self._ranks is not None:
            self._ranks.compile_begins()

    def compile_ends(self) -> None:
        """This rank compiles no more."""
        if self._ranks is not None:
            self._ranks.compile_ends()

    def failed(self, owner: Owner, reason: str) -> None:
        """The compiler failed on a target on this rank."""
        if self._ranks is not None:
            self._news.failures.append((owner, reason))

    def warn_elsewhere(self, subject: Hashable, message: str) -> bool:
        """Have rank zero warn of something; ``False`` on rank zero itself, which is to do it."""
        if self.speaks:
            return False
        self._news.warnings.append((subject, message))
        return True

    def end_run(self, message: str) -> None:
        """Tell the others that this rank is about to end the run by an error."""
        if self._ranks is not None and self.in_step:
            self.in_step = False
            self._news.fatal = message
            self._ranks.leave(self._told())

    # ------------------------------------------------------------------------------------------ what these call

    def _joined(self, placement: str) -> Ranks | None:
        try:
            return Ranks(placement, on_wait=self._wait)
        except RuntimeError as error:  # gloo finds no network interface, for example
            if self.speaks:
                message = f"processes do not wait for each other's compiles: {type(error).__name__}: {error}"
                self.on_warning("meetings", message)
            return None

    def _meet(self) -> None:
        if self._ranks is not None:
            self._hear(self._ranks.meet(self._told()))

    def _meet_in_step(self) -> None:
        if self._ranks is not None and self.in_step:
            self._hear(self._ranks.meet_in_step(self._told()))

    def _wait(self, seconds: float) -> None:
        if seconds < self._said_at_seconds:  # another wait
            self._said_at_seconds = 0.0
        if seconds - self._said_at_seconds >= LINE_SECONDS:
            self._said_at_seconds = seconds
            self._say(f"waiting for other processes, which compile: {seconds:.0f} s")

    def _told(self) -> News | None:
        told, self._news = self._news, News()
        return None if told == News() else told

    def _hear(self, heard: Heard) -> list[Any] | None:
        assert self._ranks is not None
        for rank, news in heard.news:
            self.disturbed |= news.compiled
            for owner, reason in news.failures:
                self.on_failure(owner, f"rank {rank}: {reason}")
            if rank != self._ranks.rank:
                for subject, message in news.warnings if self.speaks else ():
                    self.on_warning(subject, f"rank {rank}: {message}")
                if news.fatal is not None:
                    self.in_step = False
                    self._ranks.leave()  # as that rank does
                    self.on_fatal(f"rank {rank}: {news.fatal}")
        return heard.values
