"""Pairs of processes that train together, run once for all tests that read their results."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from filelock import FileLock

from compile_callbacks import CompileWarning
from tests.support.models import FLOAT32, FLOAT32_ON_GPU
from tests.support.processes import start_new_process

_SUPPORT = Path(__file__).parent

ACCELERATOR = os.environ.get("RANK_ACCELERATOR", "cpu")
"""The accelerator of this rank: ``"cpu"`` with gloo, or ``"gpu"`` with NCCL and a GPU for each rank."""

BACKEND = {"cpu": "gloo", "gpu": "nccl"}[ACCELERATOR]

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ACCELERATOR == "gpu" else torch.device("cpu")


def made_once(name: str, make: Callable[[Path], None], tmp_path_factory, worker_id: str) -> Path:
    """Return a folder that the first of pytest-xdist's workers fills, and all of them read."""
    base = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        base = base.parent
    folder = base / name
    with FileLock(base / f"{name}.lock"):
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder


def _run_pair(script: str, folder: Path, accelerator: str, cases: list[str], seconds: float = 280) -> None:
    """Run a script of this folder in two processes. What each printed is left in ``printed.RANK``."""
    environment = {"NODE_RANK": "0", "RANK_ACCELERATOR": accelerator}
    environment |= {"NVIDIA_TF32_OVERRIDE": "0"} if accelerator == "gpu" else {}
    processes = [
        start_new_process(
            _SUPPORT / script,
            [folder, *cases],
            environment={**environment, "LOCAL_RANK": str(rank)},
            printed=folder / f"printed.{rank}",
            uses_gpu=accelerator == "gpu",
        )
        for rank in (0, 1)
    ]
    until = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(until - time.monotonic(), 0))
    finally:
        for process in processes:
            process.kill()
            process.join()


def join(folder: Path, name: str, timeout: float = 600) -> None:
    """Join the default process group. The first process writes the port of its store to a file for the second."""
    rank, port = int(os.environ["LOCAL_RANK"]), folder / f"{name}.port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        unfinished = port.with_suffix(".unfinished")
        unfinished.write_text(str(store.port))
        unfinished.replace(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), 2)
    if ACCELERATOR == "gpu":
        torch.cuda.set_device(DEVICE)  # for collectives of objects, whose tensors NCCL needs on this rank's GPU
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))


def run_cases(folder: Path, cases: Iterable[Callable[[], dict[str, Any]]]) -> None:
    """Run cases in this process. Write ``CASE.RANK.json`` with the result of each, and ``.err`` and ``.out``."""
    torch.manual_seed(0)
    for case in cases:
        torch._dynamo.reset()
        name = f"{case.__name__}.{os.environ['LOCAL_RANK']}"
        with (
            (folder / f"{name}.out").open("w") as out,
            (folder / f"{name}.err").open("w") as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                result = case()
            except BaseException:
                result = {"raised": traceback.format_exc()}
        result["warnings"] = [str(w.message) for w in caught if issubclass(w.category, CompileWarning)]
        result["groups"] = len(dist.distributed_c10d._world.pg_map)
        (folder / f"{name}.json").write_text(json.dumps(result))
        if "raised" in result:
            break  # the other process is somewhere else by now
    if dist.is_initialized():
        dist.destroy_process_group()


def pair_of(script: str, cases: list[str]) -> Any:
    """Return a fixture: a `Pair` that runs all cases once, because starting the processes takes longer than a case."""

    @pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
    def pair(request, tmp_path_factory, worker_id):
        fill = lambda folder: _run_pair(script, folder, request.param, cases)  # noqa: E731
        return Pair(made_once(f"{script}_{request.param}", fill, tmp_path_factory, worker_id), request.param)

    return pair


class Pair:
    """The results of each of two processes for each case."""

    def __init__(self, folder: Path, accelerator: str) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.close = FLOAT32_ON_GPU if accelerator == "gpu" else FLOAT32

    def __call__(self, case: str) -> list[dict[str, Any]]:
        results = []
        for rank in (0, 1):
            written, printed = self.folder / f"{case}.{rank}.json", self.folder.glob(f"printed.{rank}")
            assert written.exists(), "\n".join(file.read_text()[-3000:] for file in printed)
            results.append(json.loads(written.read_text()))
            assert "raised" not in results[rank], f"rank {rank}: {results[rank]['raised']}"
        return results
