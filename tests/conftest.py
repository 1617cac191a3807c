"""Gives each test a fresh compiler, and checks that it leaves nothing behind in torch."""

from __future__ import annotations

import gc
import logging
import os
import re

import tests.support.caches  # noqa: F401  (before torch)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for tiny tensors, several threads are slower

import pytest
import torch
import torch._dynamo
import torch._dynamo.config
import torch._inductor.config
from torch._dynamo.callback import callback_handler

from compile_callbacks import CompileWarning, _torch, compile_phases, restore
from compile_callbacks.calls import compiled_function
from compile_callbacks.cli.explain import read_entries

pytest.register_assert_rewrite("tests.cases.case")

# For doctests, pytest would import these modules a second time, under another name, and register their custom operators
# twice.
collect_ignore = ["support"]

ENTRIES = read_entries()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        distributed = item.path.parent.name == "distributed"  # two processes, each of which compiles
        if distributed:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and torch.cuda.device_count() < 1 + distributed:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs" if distributed else "needs a GPU"))


@pytest.fixture(autouse=True, scope="session")
def _few_objects_to_collect():
    """Exempt the objects of torch's modules from garbage collection, which takes as long as some compiles of tests."""
    _torch.inductor.import_inductor()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Discard the compiled code of other tests before a test; afterwards, check torch's global settings and hooks."""
    torch._dynamo.reset()
    compiled_function.CompiledFunction._compiles = 0  # of code that torch has not discarded
    torch.manual_seed(0)
    inductor, dynamo = torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()
    environment = dict(os.environ)
    hooks = _global_hooks()
    yield
    assert _torch.ports._failures == {}
    assert _global_hooks() == hooks
    assert torch._inductor.config.get_config_copy() == inductor
    assert torch._dynamo.config.get_config_copy() == dynamo
    assert callback_handler.start_callbacks == []
    assert callback_handler.end_callbacks == []
    changed = {name for name, value in os.environ.items() if environment.get(name) != value}
    assert not {name for name in changed if not name.startswith(_SET_BY_OTHERS)}


@pytest.fixture(autouse=True)
def _warnings_have_entries(monkeypatch):
    """Each warning of the library has a code that ``compile-callbacks explain`` knows."""
    messages: list[str] = []
    monkeypatch.setattr(CompileWarning, "__init__", lambda warning, *args: messages.extend(map(str, args)))
    yield
    codes = [re.search(r"\[(CC\d{3}): compile-callbacks explain \1\]$", message) for message in messages]
    assert [message for message, code in zip(messages, codes, strict=True) if not (code and code[1] in ENTRIES)] == []


def _global_hooks() -> dict[str, list[int]]:
    """The keys of the hooks that are registered for every module of the process."""
    hooks = vars(torch.nn.modules.module)
    return {name: list(keys) for name, keys in hooks.items() if name.startswith("_global_") and isinstance(keys, dict)}


@pytest.fixture
def no_codegen(request):
    """Let Inductor call aten's kernels on a CPU, which saves most of the time of a compile.

    For tests whose subject is not the generated code.
    """
    generates = "gpu" in request.keywords or "codegen" in request.keywords
    with torch._inductor.config.patch(fallback_by_default=not generates):
        yield


@pytest.fixture
def captured_graph(monkeypatch):
    """Run the graphs that Dynamo captures in the place of Inductor's code, in a third of the time of a compile.

    For tests of targets, shapes, counts and sentences; not of values, freezing, passes, caches or memory. AOTAutograd
    does not run either: with it, a compile would take longer than one whose graph is in torch's cache.
    """
    captured = _torch.graphs.eager_graph
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: captured(graph).forward)


@pytest.fixture
def compiled():
    """Compiles modules with `compile_phases`, and restores them after the test."""
    modules = []

    def compile_module(module, *modes, **settings):
        modules.append(compile_phases(module, *modes, **settings))
        return modules[-1]

    yield compile_module
    for module in modules:
        restore(module)


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def forked_helper(monkeypatch):
    """Fork helper processes of ``background=True`` from one that has imported torch, which takes each 5 s of CPU."""
    from tests.support.processes import subprocess_with_forked_helper

    monkeypatch.setattr("compile_callbacks.background.helper.subprocess", subprocess_with_forked_helper())


@pytest.fixture
def recompiles_at_once(monkeypatch):
    """Recompile at the first call that no graph fits, for tests whose subject is what a recompile does."""
    monkeypatch.setattr(compiled_function, "RECOMPILE_AFTER", 1)


@pytest.fixture
def dropped_backends_go():
    """Collect backends that a test dropped while they were active; until then they listen to torch."""
    yield
    if callback_handler.start_callbacks:
        gc.collect()


# torch, Lightning, scikit-learn and the packages of tests/models set these.
_SET_BY_OTHERS = (
    "PYTEST",
    "TORCHINDUCTOR",
    "_TORCHINDUCTOR",
    "PL_",
    "TRITON",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_NVML",
    "KMP_",
    "CRC32C_SW_MODE",
    "CUBLAS_WORKSPACE_CONFIG",
    "RAY_CLIENT_MODE",
)


@pytest.fixture
def logged():
    """The lines of Lightning's loggers, which propagate them only if they were imported after pytest's plugin.

    The package that was imported last decides which logger both use for lines of rank zero.
    """
    lines, handler = [], logging.Handler()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    handler.emit = lambda record: lines.append(record.getMessage())
    for logger in loggers:
        logger.addHandler(handler)
    yield lambda: lines
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def background_ms(monkeypatch):
    """The times of steps with ``background=True``, by variant. Steps that look slower would be compared again.

    Runs are never too short to compile.
    """
    from tests.support.step_times import Times

    monkeypatch.setattr("compile_callbacks.session.phase_run.LEAST_SECONDS", 0.0)
    ms = {"eager": 2.0, "waiting": 2.0, None: 1.0}
    Times(monkeypatch, train=lambda name, workload: ms.get(name), infer=lambda name, workload: ms.get(name))
    return ms
