"""Has several ways to do the same work run blocks of steps in turn, with nothing else running meanwhile.

Each way is a process of its own. They prepare together, a turn on the device at a time (`turn`). When all of them are
ready, the processes of one work run a block of steps each, there and back again, and wait while others run theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from work import Way, Work

Group = tuple[Work, Sequence[Way]]


@dataclass(frozen=True)
class Pacing:
    """How it is measured.

    Args:
        blocks: Timed blocks of each way.
        steps: Steps of each way in all of them together, at least.
        block_seconds: How long a block is at least.
        prepare_steps: Steps of each way before that, at least.
        jobs: Processes that prepare at once.
        patience_seconds: How long all of them together may prepare; what is not ready then is left out.
        own_caches: Whether each compiles with an empty cache; else all share torch's.
    """

    blocks: int = 10
    steps: int = 60
    block_seconds: float = 0.1
    prepare_steps: int = 10
    jobs: int = max(1, (os.cpu_count() or 2) // 2)
    patience_seconds: float = 400.0
    own_caches: bool = False


@dataclass
class _Player:
    """A process, and what came of it."""

    work: Work
    way: Way
    process: Any
    connection: Any
    its_connection: Any
    told: dict[str, Any] | None = None
    failure: str | None = None
    blocks: list[float] = field(default_factory=list)
    steps: int = 0

    def start(self) -> None:
        self.process.start()
        self.its_connection.close()  # or its end would not be heard of

    def end(self) -> None:
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()

    def receive(self) -> Any:
        """The next message; ``None`` where the process failed."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(10)
            kind, content = "failed", f"its process ended with {self.process.exitcode}"
        if kind == "failed":
            self.failure = content
            say(f"{label(self)} failed: {content}")
            return None
        return content

    @property
    def ready(self) -> bool:
        return self.told is not None and self.failure is None


def conduct(groups: Sequence[Group], pacing: Pacing) -> Iterator[list[dict[str, Any]]]:
    """Measure groups of ways, all of which prepare at once; gives the rows of one group after the other."""
    context = multiprocessing.get_context("spawn")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the processes then end too
    # Compile workers of all processes together, as many as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // pacing.jobs)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        players: list[_Player] = []
        for work, way in [(work, way) for work, ways in groups for way in ways]:
            ours, theirs = context.Pipe()
            cache = f"{folder}/{len(players)}" if pacing.own_caches else None
            arguments = work, way, theirs, Path(folder, "turn"), pacing.prepare_steps, cache
            players.append(_Player(work, way, context.Process(target=_play, args=arguments, daemon=True), ours, theirs))
        try:
            _await_ready(players, pacing)
            for work, _ in groups:
                of_group = [player for player in players if player.work is work]
                _time(of_group, pacing)
                yield [_row(player) for player in of_group]
                for player in of_group:
                    _stop(player)
        finally:
            for player in players:
                player.end()


def _play(*arguments: Any) -> None:
    from ways import play  # which imports torch: for the process itself to do

    play(*arguments)


def _await_ready(players: Sequence[_Player], pacing: Pacing) -> None:
    started = time.perf_counter()
    to_start, waiting = list(players), []
    while to_start or waiting:
        while to_start and len(waiting) < pacing.jobs:
            waiting.append(to_start.pop(0))
            waiting[-1].start()
        left = pacing.patience_seconds - (time.perf_counter() - started)
        heard = wait([player.connection for player in waiting], timeout=max(0.0, left))
        for player in waiting:
            if player.connection in heard:
                player.told = player.receive()
                if player.told is not None:
                    say(f"{time.perf_counter() - started:4.0f} s  {label(player)} is ready")
            elif left <= 0:
                player.failure = f"was not ready after {pacing.patience_seconds:.0f} s"
                say(f"{label(player)} {player.failure}")
                player.process.kill()
        waiting = [player for player in waiting if player.told is None and player.failure is None]


def _time(players: Sequence[_Player], pacing: Pacing) -> None:
    for player in players:
        if player.ready:  # how long a step takes, to know how many make a block
            milliseconds = _block(player, 3) or 0.0
            least = pacing.block_seconds * 1000 / milliseconds if milliseconds else 1
            player.steps = max(1, -(-pacing.steps // pacing.blocks), round(least))
    for number in range(pacing.blocks):
        for player in players if number % 2 == 0 else reversed(players):
            if player.ready and (milliseconds := _block(player, player.steps)) is not None:
                player.blocks.append(milliseconds)


def _block(player: _Player, steps: int) -> float | None:
    """Milliseconds a step; ``None`` for a block in which something compiled."""
    player.connection.send(steps)
    return player.receive()


def _stop(player: _Player) -> None:
    if player.ready:
        player.connection.send(None)
        player.process.join(0.5)
    player.end()


def _row(player: _Player) -> dict[str, Any]:
    told = player.told or {}
    report = told.pop("report", None) or {}
    trials = [trial for trial in report.get("trials", ()) if player.way.tuned]
    chosen = next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None)
    quartiles = statistics.quantiles(player.blocks, n=4) if len(player.blocks) > 1 else None
    return {
        **vars(player.work),
        "way": player.way.name,
        "step_ms": statistics.median(player.blocks) if player.blocks else None,
        "spread_ms": quartiles[2] - quartiles[0] if quartiles else None,
        "blocks": len(player.blocks),
        "steps_per_block": player.steps,
        "block_ms": player.blocks,
        "chosen": chosen,
        "trials": trials,
        "graphs": report.get("graphs"),
        "failure": player.failure,
        **told,
    }


def label(player: _Player) -> str:
    """A process by what it does."""
    return f"{player.work.model}, {player.work.phase}, batch {player.work.batch_size}: {player.way.name}"


def say(line: str) -> None:
    """Tell whoever waits."""
    print(line, file=sys.stderr, flush=True)
