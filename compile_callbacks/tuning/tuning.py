"""A phase that is tuned: candidates put in force for real steps, until one of them is the phase's settings."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from compile_callbacks.compiling.sharding import MOVING_WEIGHTS
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.measuring.by_size import BySize
from compile_callbacks.measuring.events import CompileEvent, CompileRecorder
from compile_callbacks.measuring.timing import WARMUP_STEPS, StepTimer
from compile_callbacks.measuring.work import Work
from compile_callbacks.phases import Phase
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.mode import EAGER
from compile_callbacks.settings.tune import AUTO, Tune, named
from compile_callbacks.tuning.auto import auto_candidates, why_not_affordable, why_not_repaid
from compile_callbacks.tuning.choices_store import Choice, ChoicesStore, fingerprint
from compile_callbacks.tuning.trial import BLOCK_SAMPLES, Known, Trial, Verdict
from compile_callbacks.tuning.tuner import Tuner

_LEAST_STEPS = 2 * (WARMUP_STEPS + BLOCK_SAMPLES) + 1  # a block of eager and one of a candidate, and its compile
_SAME_EAGER = 1.5  # times as long as when eager was chosen: hosts vary by less, other work by more
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was seen of a step.

    Attributes:
        sample: Whether its time is a sample.
        seconds: How long it took, compiling and reading of times included.
        compile_seconds: How much of it went into compiling.
        graphs: How many graphs were compiled of the candidate so far, in steps that not all processes took among them.
        problem: Why the candidate is out, if it is.
    """

    sample: bool
    seconds: float
    compile_seconds: float
    graphs: int
    problem: tuple[Verdict, str] | None

    @staticmethod
    def of_all(observed: Sequence[Observed]) -> Observed:
        """What was seen of a step that several processes took together: the slowest counts, and any problem."""
        problems = [one.problem for one in observed]
        return Observed(
            sample=all(one.sample for one in observed),
            seconds=max(one.seconds for one in observed),
            compile_seconds=max(one.compile_seconds for one in observed),
            graphs=min(one.graphs for one in observed),
            problem=next((problem for problem in problems if problem is not None), None),
        )


def slowest(
    read: Sequence[Mapping[Work, tuple[float, ...]]], *, by_size: bool | None = None
) -> dict[Work, tuple[float, ...]]:
    """Of each kind of work the samples of the process that took longest for it; where shapes vary, of all its steps.

    Args:
        read: The samples of each process, in milliseconds, by their work.
        by_size: Whether shapes vary; ``None`` where these samples tell.
    """
    works = dict.fromkeys(work for samples in read for work in samples)
    if by_size is None:
        pooled = {work: [ms for samples in read for ms in samples.get(work, ())] for work in works}
        by_size = BySize.of(pooled) is not None
    if by_size:
        # Hardly two steps are of equal work: the steps of one process, or each would count once in each of them.
        medians_ms = [statistics.median([ms for of in samples.values() for ms in of] or [0.0]) for samples in read]
        return dict(read[medians_ms.index(max(medians_ms))])
    return {
        work: max((samples[work] for samples in read if samples.get(work)), key=statistics.median, default=())
        for work in works
    }


def alone(what: _T) -> Sequence[_T]:
    """What one process knows, which is all of them: see `PhaseTuning`."""
    return [what]


class PhaseTuning:
    """Runs the candidates of one phase in turn, and has the phase run with the one that is chosen.

    While nothing is chosen, a candidate is in force during steps that are measured, and nothing is compiled outside
    of them. What loses gives back what was compiled for it at once.

    Args:
        phase: The phase.
        tune: The candidates and the rule.
        switch: Runs targets with a candidate.
        recorder: Knows what happened while compiling.
        timer: Knows how long steps took.
        say: Takes a line of text.
        gather: Gives what each process knows, in the same order in all of them: an `Observed`, samples by their work,
            an earlier `Choice`. What is decided is decided by all of it, or processes that train together would run
            different candidates. Nothing, where not all processes are there: the step does not count then. Where they
            meet no more, what this one knows.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        phase: Phase,
        tune: Tune,
        *,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        timer: StepTimer,
        say: Callable[[str], None],
        gather: Callable[[Any], Sequence[Any]] = alone,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phase = phase
        self.tune = tune
        self._switch = switch
        self._recorder = recorder
        self._timer = timer
        self._say = say
        self._gather = gather
        self._clock = clock
        self._configs: dict[str, InductorConfig] = {}
        self._device = torch.device("cpu")
        self._tuner: Tuner | None = None
        self._planned = False
        self._store: ChoicesStore | None = None
        self._earlier: dict[str, Choice] = {}
        self._works: Counter[Work] = Counter()  # of the steps in which candidates were tried
        self._recalled_by: Work | None = None  # what an earlier choice was looked up for
        self._made_for: Mapping[str, str] | None = None
        self._began_anew = False
        self._seconds_left = math.inf
        self._told_at = 0.0
        self._in_force: str | None = None
        self._last_turn: str | None = None
        self._found = self._looked_again = False
        self._checked: str | None = None
        self._events_before = 0
        self._started = 0.0
        self._reading_seconds = 0.0

    # ------------------------------------------------------------------------------------------ what it is told

    def begin(self, device: torch.device, store: ChoicesStore | None = None) -> None:
        """A trainer run begins; `expect` is to follow before a step that is measured.

        Args:
            device: Where the module is.
            store: Where choices are kept across runs.
        """
        self._store = store
        self._planned = False
        self._last_turn = None
        if self._tuner is None:
            self._device = device
            self._tuner = self._new_tuner()
        self._tuner.run_begins()
        self._use(self._tuner.winner or EAGER)

    def expect(self, steps_left: float, seconds_left: float = math.inf) -> None:
        """So many steps of the phase are to come; ``math.inf`` where that is not known; the first number counts.

        Args:
            steps_left: How many steps.
            seconds_left: When the run ends by the clock.
        """
        assert self._tuner is not None
        self._seconds_left, self._told_at = seconds_left, self._clock()
        if not self._planned or math.isinf(self._tuner.steps_left):
            self._planned = True
            self._plan(self._tuner, steps_left, seconds_left)
            self._use(self._tuner.winner or EAGER)

    def begin_anew(self, steps_left: float) -> bool:
        """Steps have come to do other work: candidates are tried anew, or a choice is recalled that was made for it.

        Args:
            steps_left: Steps of the phase to come, of all processes the fewest.

        Returns:
            Whether all processes do.
        """
        since_told = self._gather(self._clock() - self._told_at)
        if not since_told:
            return False
        chosen = self.winner
        if chosen not in (None, EAGER):
            if any(self._gather(self._switch.gave_up(self.phase, str(chosen)))):
                self._switch.drop(self.phase, str(chosen))
                chosen = None
            else:
                self._switch.try_again(self.phase, str(chosen))
        self._recalled_by, self._made_for, self._last_turn, self._checked = None, None, None, None
        self._began_anew = True
        self._works.clear()
        self._found = self._looked_again = False
        self._tuner = self._new_tuner(self._tuner, compiled=chosen)
        self._plan(self._tuner, steps_left, self._seconds_left - max(since_told))
        self._use(self._tuner.winner or EAGER)
        return True

    def recall(self, fingerprint: str, choice: Choice) -> None:
        """The run that this one resumes chose so, under circumstances of this fingerprint."""
        self._earlier[fingerprint] = choice

    def step_begins(self, *, measured: bool) -> InductorConfig | None:
        """A step begins; gives the settings that it is to run with, ``None`` for eager.

        Args:
            measured: Whether its time may be a sample.
        """
        assert self._tuner is not None
        name = self._tuner.candidate if measured or self._tuner.winner is not None else EAGER
        if self._tuner.winner is None and measured:
            if name != self._last_turn:
                self._timer.takes_turn(self.phase, compiled=name != EAGER, settings=_settings(name))
            self._last_turn = name
            self._events_before = len(self._recorder.events)
            self._started = self._clock()
        return self._use(name)

    def step_ends(
        self, work: Work, *, measured: bool, sample: bool, made_for: Callable[[Work], Mapping[str, str]]
    ) -> None:
        """A step ends.

        Args:
            work: What it did.
            measured: As `step_begins` was told.
            sample: Whether its time is a sample.
            made_for: Tells the circumstances that a choice for some work would hold for.
        """
        tuner = self._tuner
        assert tuner is not None
        if tuner.winner is not None or not measured:
            return
        self._works[work] += 1
        if self._step_of_candidate(tuner, sample, made_for):
            if tuner.winner is not None and self._recalled_by is not None:
                self._made_for = made_for(self._judged_by(tuner, self._recalled_by))
            self._apply(tuner)

    def settle(self, reason: str) -> None:
        """Choose now, among what is proven."""
        if self._tuner is not None and self._tuner.winner is None:
            self._tuner.settle(reason)
            self._apply(self._tuner)

    # ------------------------------------------------------------------------------------------ what it tells

    @property
    def winner(self) -> str | None:
        """What is chosen; ``None`` while nothing is."""
        return None if self._tuner is None else self._tuner.winner

    @property
    def in_force(self) -> str | None:
        """The candidate that targets run with at present; ``None`` for eager."""
        return self._in_force

    @property
    def config(self) -> InductorConfig | None:
        """Its settings."""
        return None if self._in_force is None else self._configs[self._in_force]

    def trials(self) -> Sequence[Trial]:
        """What came of each candidate so far; nothing where the phase did not run."""
        if self._tuner is None:
            return ()
        trials = self._tuner.trials()
        return trials if self._tuner.winner is not None or any(trial.samples for trial in trials) else ()

    def choice(self) -> dict[str, Any] | None:
        """What was chosen, and the fingerprint of what for, as plain data; ``None`` while nothing is."""
        if self._tuner is None or self._tuner.winner is None or self._made_for is None:
            return None
        if not self._tuner.worth_keeping:
            return None
        return {"fingerprint": fingerprint(self._made_for), **self._as_choice(self._tuner.winner).to_data()}

    # ------------------------------------------------------------------------------------------ what these call

    def _new_tuner(self, before: Tuner | None = None, compiled: str | None = None) -> Tuner:
        sharded = any(member.sharded for target in self._switch.targets for member in target.members)
        bakes_in = not (sharded or self._switch.shares_graphs)
        self._configs = named(self.tune.configs or auto_candidates(self._device, self.phase, freezes=bakes_in))
        no_freezing = "repeated blocks share a graph without weights"
        no_cudagraphs = "" if self._device.type == "cuda" else "the module is not on a GPU"
        if sharded:
            no_freezing = no_cudagraphs = MOVING_WEIGHTS
        idle = [name for name, c in self._configs.items() if c.uses_cudagraphs and no_cudagraphs]
        frozen = [name for name, c in self._configs.items() if c.freezes and not bakes_in and self.phase == "infer"]
        return Tuner(
            self._configs,
            rule=self.tune.rule,
            steps=self.tune.steps,
            budget_seconds=self.tune.budget_seconds,
            min_speedup=self.tune.min_speedup,
            latency_budget_ms=self.tune.latency_budget_ms,
            why_not=self._why_not,
            compile_seconds=before.compile_seconds if before is not None else None,
            compiled=compiled,
            least_steps=_LEAST_STEPS if self.tune.candidates == AUTO else 0,
            skip={
                **dict.fromkeys(frozen, f"it asks for freezing, and {no_freezing}"),
                **dict.fromkeys(idle, f"it asks for CUDA graphs, and {no_cudagraphs}"),
            },
        )

    def _plan(self, tuner: Tuner, steps_left: float, seconds_left: float) -> None:
        """Tell of the steps to come; what was chosen is a candidate again where that is open again."""
        chosen = tuner.winner
        tuner.plan(steps_left, seconds_left)
        if chosen not in (None, EAGER) and tuner.winner != chosen:
            self._switch.try_again(self.phase, str(chosen))

    def _use(self, name: str) -> InductorConfig | None:
        settings = _settings(name)
        if settings != self._in_force:
            self._in_force = settings
            self._switch.use(self.phase, self.config, settings)
        return self.config

    def _step_of_candidate(self, tuner: Tuner, sample: bool, made_for: Callable[[Work], Mapping[str, str]]) -> bool:
        """What came of a step; whether all processes took it."""
        name = tuner.candidate
        self._recorder.collect()
        events = [e for e in self._recorder.events[self._events_before :] if e.phase == self.phase]
        now = self._clock()
        mine = Observed(
            sample=sample,
            seconds=now - self._started + self._reading_seconds,
            compile_seconds=sum(event.seconds or 0 for event in events if event.kind == "compile"),
            graphs=self._graphs_of(name),
            problem=None if name == EAGER else _problem(events),
        )
        self._reading_seconds = 0.0
        if not (gathered := self._gather(mine)):
            return False
        observed = Observed.of_all(gathered)
        over = tuner.step_ends(
            sample=observed.sample, seconds=observed.seconds, compile_seconds=observed.compile_seconds
        )
        if observed.problem is not None:
            tuner.rule_out(*observed.problem)
        elif over and name != EAGER and not observed.graphs:
            tuner.rule_out("failed", "nothing was compiled in its steps")
        elif over:
            read = self._timer.samples(self.phase, compiled=name != EAGER, settings=_settings(name))
            by_size = None if name == EAGER else tuner.by_size
            tuner.measured(slowest(self._gather(read), by_size=by_size))
            if self._recalled_by is None or self._is_to_look_again(tuner):
                self._remember(tuner, made_for)
            if tuner.winner is None:
                tuner.block_ends()
        self._reading_seconds = self._clock() - now
        return True

    def _remember(self, tuner: Tuner, made_for: Callable[[Work], Mapping[str, str]]) -> None:
        """Eager has its first samples: go on with what an earlier run chose under the same circumstances."""
        usual = self._works.most_common(1)[0][0]
        self._recalled_by = usual.of_any_size if tuner.by_size else usual
        circumstances = made_for(self._recalled_by)
        found = self._kept(circumstances)
        if found is None and len({work.shapes for work in self._works}) > 1:  # so few do not tell whether shapes vary
            circumstances = made_for(usual.of_any_size)
            found = self._kept(circumstances)
        if tuner.by_size and self._began_anew:
            found = None  # it is what this run has found to be over
        choice = next((of_process for of_process in self._gather(found) if of_process is not None), None)
        self._found = choice is not None
        known = [self._as_choice(name) for name in (EAGER, *self._configs)]
        if choice is not None and choice in known and not self._is_of_other_steps(choice, tuner.eager_ms):
            file = None if self._store is None else self._store.path(circumstances)
            how_to_forget = None if file is None else f"without {file} all candidates are tried again"
            tuner.remember(choice.candidate, choice.holds_for_steps, how_to_forget=how_to_forget)
            self._checked = choice.candidate if tuner.remembers else None

    def _is_to_look_again(self, tuner: Tuner) -> bool:
        """Whether the first batches had all kinds of shapes, and most have one after all."""
        again = not (self._found or self._looked_again or tuner.by_size or tuner.remembers)
        again = again and len({work.shapes for work in self._works}) > 1
        self._looked_again |= again
        return again

    def _graphs_of(self, name: str) -> int:
        settings = _settings(name)
        return sum(e.graphs for e in self._recorder.events if e.phase == self.phase and e.settings == settings)

    def _is_of_other_steps(self, choice: Choice, eager_ms: float | None) -> bool:
        """Whether eager was chosen when its steps took another time; a compiled choice is compared with these."""
        if choice.candidate != EAGER or choice.eager_ms is None or eager_ms is None:
            return False
        if max(choice.eager_ms, eager_ms) <= _SAME_EAGER * min(choice.eager_ms, eager_ms):
            return False
        self._say(
            f"{self.phase} phase: eager was chosen in an earlier run, whose eager steps took {choice.eager_ms:.2f} ms; "
            f"these take {eager_ms:.2f} ms, and all candidates are tried"
        )
        return True

    def _kept(self, made_for: Mapping[str, str]) -> Choice | None:
        found = self._earlier.get(fingerprint(made_for))
        return self._store.load(made_for) if found is None and self._store is not None else found

    def _judged_by(self, tuner: Tuner, recalled_by: Work) -> Work:
        """What most steps did by which candidates were judged; what the choice was looked up for, where many did that.

        Accumulation and the like alternate, and a choice is to be found again.
        """
        times: Counter[Work] = Counter()
        for work, of_work in self._works.items():
            times[work.of_any_size if tuner.by_size else work] += of_work
        usual, most = times.most_common(1)[0]
        return recalled_by if 2 * times[recalled_by] >= most else usual

    def _as_choice(self, name: str) -> Choice:
        steps, eager_ms = (0.0, None) if self._tuner is None else (self._tuner.holds_for_steps, self._tuner.eager_ms)
        key = "" if name == EAGER else self._configs[name].key()
        return Choice(candidate=name, key=key, holds_for_steps=steps, eager_ms=eager_ms)

    def _why_not(self, name: str, known: Known) -> str | None:
        if (reason := why_not_affordable(name, self._configs, known)) is not None:
            return reason
        return why_not_repaid(name, self._configs, self._device, known) if self.tune.candidates == AUTO else None

    def _apply(self, tuner: Tuner) -> None:
        """Leave the candidate of the step that is over, and do what was decided in it."""
        self._use(EAGER if tuner.winner is None else tuner.winner)
        for name in self._configs:
            if tuner.is_out(name):
                self._switch.drop(self.phase, name)
        if self._checked is not None and not tuner.remembers:
            if self._checked != tuner.winner:
                verdict = next(trial.verdict for trial in tuner.trials() if trial.candidate == self._checked)
                what = f"{verdict}" if verdict in ("failed", "wrong") else "not faster than eager"
                self._say(
                    f"{self.phase} phase: {self._checked}, chosen in an earlier run, is {what} in this one; all "
                    "candidates are tried"
                )
            self._checked = None
        if tuner.winner is not None:
            self._switch.choose(self.phase, tuner.winner)
            self._say(f"{self.phase} phase: {_in_words(tuner.trials())}")
            self._keep(tuner, tuner.winner)

    def _keep(self, tuner: Tuner, winner: str) -> None:
        """Keep the choice for later runs."""
        if self._store is None or self._made_for is None or not tuner.worth_keeping:
            return
        if tuner.believed and self._store.load(self._made_for) is not None:
            return  # it holds what came of all candidates when they were tried
        told = [trial.to_dict() for trial in tuner.trials()]
        if problem := self._store.save(self._made_for, self._as_choice(winner), told):
            self._say(f"{self.phase} phase: the choice could not be kept for later runs: {problem}")


def _settings(name: str) -> str | None:
    return None if name == EAGER else name


def _in_words(trials: Sequence[Trial]) -> str:
    """What was chosen, and its figures beside eager's where both were measured."""
    winner = next(trial for trial in trials if trial.verdict == "chosen")
    eager_ms = trials[0].median_ms
    words = f"{winner.candidate} is chosen"
    if winner.candidate != EAGER and winner.median_ms is not None and eager_ms is not None:
        words += f" ({winner.median_ms:.2f} ms a step, {eager_ms:.2f} ms eager)"
    return words + (f": {winner.reason}" if winner.reason else "")


def _problem(events: Sequence[CompileEvent]) -> tuple[Verdict, str] | None:
    """Why a candidate is out, by what happened in one of its steps."""
    for event in events:
        if event.kind == "verify" and event.reason and event.max_abs_error is not None:
            return "wrong", event.reason
    for event in events:
        if event.kind == "fallback":
            return "failed", event.reason or "torch gives no reason"
    return None
