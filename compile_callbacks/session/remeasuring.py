"""When a phase is measured anew: its steps have come to do other work than what eager ones were measured at."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from compile_callbacks.measuring.baseline import Baseline
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.work import STEPS_BETWEEN_LOOKS, KnownWork, Work
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.tuning.tuning import PhaseTuning

_LEAST_STEPS_TO_COME = 100  # what was measured stays, rather than that a run ends before it is measured anew


class Remeasuring:
    """Has eager steps measured again, or candidates tried again, where most steps are comparable with none before.

    Another resolution, longer sequences, a backbone that is trained after all: what was measured says nothing of them.

    Args:
        module: The root module.
        baselines: The eager steps of each phase.
        tunings: The phases that are tuned.
        timer: Knows the steps' times.
        memory: Knows the peaks of memory.
        meetings: Where processes agree on it.
        say: Takes a line of text.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        baselines: Mapping[Phase, Baseline],
        tunings: Mapping[Phase, PhaseTuning],
        timer: StepTimer,
        memory: PeakMemory,
        meetings: Meetings,
        say: Callable[[str], None],
    ) -> None:
        self._module = module
        self._baselines = baselines
        self._tunings = tunings
        self._timer = timer
        self._memory = memory
        self._meetings = meetings
        self._say = say
        self._known = {phase: KnownWork(meetings.gather) for phase in PHASES}
        self._steps_left: dict[Phase, float] = dict.fromkeys(PHASES, math.inf)
        self._which_train = self._steps = 0

    def begin(self) -> None:
        """A run begins, maybe in the middle of an epoch."""
        self._steps = 0

    def expect(self, phase: Phase, steps_left: float) -> None:
        """So many steps of the phase are to come; ``math.inf`` where that is not known."""
        self._steps_left[phase] = steps_left

    def with_weights(self, work: Work, *, look: bool) -> Work:
        """The work of a train step with which weights it trains: beneath a frozen backbone there is less to do.

        Args:
            work: The work.
            look: Whether that may have changed: an epoch begins, or something compiled.
        """
        if look or self._steps % STEPS_BETWEEN_LOOKS == 0:  # at the first step of a run too
            self._which_train = zlib.crc32(bytes(weight.requires_grad for weight in self._module.parameters()))
        self._steps += 1
        return work.where(trained=self._which_train)

    def restored(self, phase: Phase, works: Iterable[Work]) -> None:
        """Eager steps of an earlier run are those that this one is compared with."""
        if phase not in self._tunings:  # an earlier choice is believed after eager steps of this run
            for work in works:
                self._known[phase].add(work._replace(new=False))

    def step_ends(self, phase: Phase, work: Work, *, compiled: bool) -> None:
        """A step that may be measured is done.

        Args:
            phase: The phase.
            work: What it did.
            compiled: Whether it ran compiled.
        """
        self._steps_left[phase] -= 1
        known, tuning, baseline = self._known[phase], self._tunings.get(phase), self._baselines[phase]
        if baseline.running if tuning is None else tuning.winner is None or not known:
            if not compiled:
                known.add(work)
            return
        if not known.has_changed(work):
            return
        of_ranks = self._meetings.gather(self._steps_left[phase])
        steps_left = min(of_ranks, default=0.0)
        if steps_left < _LEAST_STEPS_TO_COME:
            return
        if not (baseline.again() if tuning is None else tuning.begin_anew(steps_left)):
            return
        known.accept_change()
        self._timer.forget(phase)
        self._memory.forget(phase)
        what = "eager steps are measured" if tuning is None else "candidates are tried"
        self._say(f"{phase} phase: most of the latest steps had other shapes, or other weights to train: {what} anew")

    def stage_ends(self, phase: Phase) -> None:
        """A stage of the phase ends, in all processes."""
        self._known[phase].stage_ends()
