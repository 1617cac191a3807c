"""Guard failures in words; the texts are torch's own, as 2.11 and 2.15 write them."""

from __future__ import annotations

import pytest
import torch
from models import FEATURES, mlp
from test_switch import recorder, switch_on  # noqa: F401

from compile_callbacks.measuring.recompiles import explain_recompile
from compile_callbacks.settings.config import InductorConfig


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("0/0: tensor 'args[0]' size mismatch at index 0. expected 32, actual 8",
         "batch dimension of argument 0: 8, was 32"),
        ("0/1: tensor 'kwargs['ids']' size mismatch at index 1. expected 3, actual 5",
         "dimension 1 of argument 'ids': 5, was 3"),
        ("2/0: tensor 'args[1]' dtype mismatch. expected Float, actual Half", "dtype of argument 1: half, was float"),
        ("0/0: tensor 'args[0]' stride mismatch at index 1. expected 4, actual 1",
         "memory layout of argument 0: stride 1 in dimension 1, was 4"),
        ("0/0: tensor 'args[0]' requires_grad mismatch. expected requires_grad=0", "argument 0 now requires grad"),
        ("0/1: tensor 'G['m']._modules['fc']._parameters['bias']' requires_grad mismatch. expected requires_grad=1.",
         "'fc.bias' no longer requires grad"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "global state changed: grad_mode"),
        ("0/1: GLOBAL_STATE changed: autocast(cpu)_enabled ", "global state changed: autocast(cpu)_enabled"),
        ("1/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(AutogradCPU), actual DispatchKeySet()",
         "x is used under inference_mode, was under no_grad"),
        ("0/0: eager.__self__._modules['drop'].training == True     # return F.dropout(input)  # dropout.py:73\nUser",
         "training flag of 'drop': eval mode, was the other"),
        ("0/1: 2 <= args[0].size()[0]  # return F.linear(...)  # linear.py:134 in forward",
         "batch dimension of argument 0: less than 2, which torch compiles apart"),
        ("0/0: kwargs['scale'] == 2      # return x * scale", "value of argument 'scale': no longer 2"),
        ("0/2: module.number == 1           # return x * self.number", "value of 'number': no longer 1"),
        ("0/1: ___as_tensor(module._modules['drop'].p).item() == 0.1  # (unknown source)",
         "value of 'drop.p': no longer 0.1"),
        ("0/0: ___check_something_new(x)  # where", "___check_something_new(x)"),
    ],
)  # fmt: skip
def test_reasons_in_words(reason, words):
    assert explain_recompile(reason) == words


def test_a_real_recompile_is_explained_and_counted_once(switch_on, recorder):  # noqa: F811
    net = mlp()
    switch = switch_on(net, configs={"train": None, "infer": InductorConfig(dynamic=False)})
    switch.select("infer")
    with torch.no_grad():
        for batch in (8, 8, 3, 8, 3):
            net(torch.randn(batch, FEATURES))
    recorder.collect()
    assert [e.reason for e in recorder.of("infer", "recompile")] == ["batch dimension of argument 0: 3, was 8"]
