"""Atomic files, texts of errors and recompiles, and tables as plain text."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

from compile_callbacks import CompileReport, PhaseReport
from compile_callbacks._utils import device
from compile_callbacks._utils.device import free_memory
from compile_callbacks._utils.files import atomic_write, read_json, write_json
from compile_callbacks._utils.messages import describe_failure
from compile_callbacks.profiling.recompiles import explain_recompile


def test_a_file_is_replaced_only_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "a.json"
    with atomic_write(path) as temporary:
        temporary.write_text("[]")
        assert not path.exists()
    assert read_json(path) == []
    write_json(path, {"name": "Zoë", "sizes": [1, 2]})
    with pytest.raises(TypeError):  # JSON has no sets
        write_json(path, {"sizes": {1, 2}})
    with contextlib.suppress(OSError), atomic_write(path) as temporary:
        temporary.write_text("ha")
        raise OSError("full")
    assert read_json(path) == {"name": "Zoë", "sizes": [1, 2]}
    assert list(tmp_path.iterdir()) == [path]


def test_describe_failure_ends_if_the_causes_are_a_ring():
    for ring in ([RuntimeError("first")], [RuntimeError("first"), ValueError("second"), ValueError("third")]):
        for error, cause in zip(ring, [*ring[1:], ring[0]], strict=True):
            error.__cause__ = cause
        assert describe_failure(ring[0]) == f"{type(ring[-1]).__name__}: {ring[-1]}"


def test_a_report_is_text_whose_long_cells_wrap_without_loss_in_any_environment(monkeypatch):
    train = PhaseReport(mode=f"options={{{'§' * 150}}}", targets=("[red]:smile:[/red]", *"abcde"))
    report = CompileReport(train=train, infer=PhaseReport(mode="max-autotune-no-cudagraphs", targets=tuple("abcd")))
    text = str(report)
    assert re.search(r" \[red\]:smile:\[/red\], a, b, c, d, e +a, b, c, d$", text, re.MULTILINE)
    assert text.count("§") == 150
    assert max(map(len, text.splitlines())) < 105
    assert "\x1b" not in text
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
        assert str(report) == text, name


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
@pytest.mark.parametrize(("limit", "free"), [("1000", 1000 - 700 + 500), ("max", None)])
def test_free_memory_of_a_cpu_is_what_is_left_of_the_limit_of_the_container(limit, free, tmp_path, monkeypatch):
    files = {"memory.max": limit, "memory.current": "700", "memory.stat": "anon 200\ninactive_file 500\nfile 500\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    found = free_memory(torch.device("cpu"))
    assert found == free if free else found > 2**20


# ------------------------------------------------------------------------------------------ recompiles

# The texts of guards are torch's own, as 2.11 and 2.15 write them.
AVOIDS = 'infer_mode={"dynamic": True}'
DROPS = f"drop_last=True in the DataLoader, or {AVOIDS}, avoids it"
TENSOR, BUFFER, BREAK = (
    f"{x} avoids it" for x in ("passing a tensor", "a buffer in its place", "removing the graph break")
)
GRAD_MODE = "Trainer(inference_mode=False) avoids it"


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("reason", "words", "fix"),
    [
        ("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8", "batch size 8, was 32", DROPS),
        ("0/0: tensor 'args[0]' size mismatch at index 1. expected 32, actual 8",
         "dimension 1 of argument 0: 8, was 32", f"{AVOIDS} avoids it"),
        ("0/0: tensor 'args[0]' dtype mismatch. expected Float, actual BFloat16",
         "dtype of argument 0: bfloat16, was float", None),
        ("0/1: tensor 'G['m']._modules['fc']._parameters['bias']' requires_grad mismatch. expected requires_grad=1.",
         "'fc.bias' no longer requires grad", None),
        ("1/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(AutogradCPU), actual DispatchKeySet()",
         "x is used under inference_mode, was under no_grad", GRAD_MODE),
        ("0/0: eager.__self__._modules['drop'].training == True     # return F.dropout(input)  # dropout.py:73\nUser",
         "'drop' is in eval mode, was in train mode", None),
        ("0/1: 2 <= args[0].size()[0]  # return F.linear(...)  # linear.py:134 in forward",
         "batch size of argument 0 below 2", DROPS),
        ("0/0: kwargs['scale'] == 2      # return x * scale", "value of argument 'scale': no longer 2", TENSOR),
        ("0/2: module.number == 1           # return x * self.number", "value of 'number': no longer 1", BUFFER),
        ("1/0: ___stack0 == -0.5", "value of a result at the graph break: no longer -0.5", BREAK),
        ("0/0: args[1] == 'a'", "args[1] == 'a'", None),
    ],
)  # fmt: skip
def test_the_reason_in_words_and_the_advice_for_the_argument_of_the_user(reason, words, fix):
    assert explain_recompile(reason, "infer_mode") == (words, fix)
    assert explain_recompile(reason) == (words, fix and fix.replace("infer_mode", "mode"))
