"""Guard failures in words; the texts are torch's own, as 2.11 and 2.15 write them."""

from __future__ import annotations

import pytest

from compile_callbacks.profiling.recompiles import explain_recompile, short_reason

pytestmark = pytest.mark.all_versions


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8",
         "batch size 8, was 32"),
        ("0/0: tensor 'args[0]' dtype mismatch. expected Float, actual BFloat16",
         "dtype of argument 0: bfloat16, was float"),
        ("0/0: tensor 'args[0]' requires_grad mismatch. expected requires_grad=0", "argument 0 now requires grad"),
        ("0/1: tensor 'G['m']._modules['fc']._parameters['bias']' requires_grad mismatch. expected requires_grad=1.",
         "'fc.bias' no longer requires grad"),
        ("1/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(AutogradCPU), actual DispatchKeySet()",
         "x is used under inference_mode, was under no_grad"),
        ("0/0: eager.__self__._modules['drop'].training == True     # return F.dropout(input)  # dropout.py:73\nUser",
         "'drop' is in eval mode, was in train mode"),
        ("0/1: 2 <= args[0].size()[0]  # return F.linear(...)  # linear.py:134 in forward",
         "batch size of argument 0 below 2"),
        ("0/0: kwargs['scale'] == 2      # return x * scale", "value of argument 'scale': no longer 2"),
        ("0/2: module.number == 1           # return x * self.number", "value of 'number': no longer 1"),
        ("1/0: ___stack0 == 0.5", "value of a result at the graph break: no longer 0.5"),
        ("0/0: kwargs['mask'] is None      # if mask is not None:", "kwargs['mask'] is None"),
        ("0/0: ___check_something_new(x)  # where", "___check_something_new(x)"),
    ],
)  # fmt: skip
def test_reasons_in_words(reason, words):
    assert explain_recompile(reason).reason == words


def test_a_tensor_is_advised_only_for_a_number():
    fixes = {value: explain_recompile(f"0/0: args[1] == {value}").fix for value in ("-2", "0.5", "'a'", "True")}
    assert [value for value, fix in fixes.items() if fix] == ["-2", "0.5"]


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8",
         'drop_last=True in the DataLoader, or infer_mode={"dynamic": True}, avoids it'),
        ("0/1: 2 <= args[0].size()[0]", 'drop_last=True in the DataLoader, or infer_mode={"dynamic": True}, avoids it'),
        ("0/0: tensor 'args[0]' size mismatch at index 1. expected 32, actual 8",
         'infer_mode={"dynamic": True} avoids it'),
    ],
)  # fmt: skip
def test_the_advice_names_the_argument_of_the_user(reason, fix):
    assert explain_recompile(reason, "infer_mode").fix == fix
    assert explain_recompile(reason).fix == fix.replace("infer_mode", "mode")


def test_a_reason_without_an_explanation_is_its_first_line():
    assert short_reason("No hooks.\n  Explanation: \n  Hint: Enable them.") == "No hooks."
