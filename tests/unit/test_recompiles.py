"""Guard failures in words, and advice. The texts are torch's own, as 2.11 and 2.15 write them."""

from __future__ import annotations

import pytest

from compile_callbacks.profiling.recompiles import explain_recompile

pytestmark = pytest.mark.all_versions

AVOIDS = 'infer_mode={"dynamic": True}'
DROPS = f"drop_last=True in the DataLoader, or {AVOIDS}, avoids it"
TENSOR, BUFFER = "passing a tensor avoids it", "a buffer in its place avoids it"
GRAD_MODE = "Trainer(inference_mode=False) avoids it"


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
        ("1/0: ___stack0 == -0.5", "value of a result at the graph break: no longer -0.5", TENSOR),
        ("0/0: args[1] == 'a'", "args[1] == 'a'", None),
    ],
)  # fmt: skip
def test_the_reason_in_words_and_the_advice_for_the_argument_of_the_user(reason, words, fix):
    assert explain_recompile(reason, "infer_mode") == (words, fix)
    assert explain_recompile(reason) == (words, fix and fix.replace("infer_mode", "mode"))
