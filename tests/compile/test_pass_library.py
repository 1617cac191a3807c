"""`TritonMaxPoolBackward` replaces the gradient of max pooling and nothing else, and equals eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks.passes import TritonMaxPoolBackward
from compile_callbacks.passes.library.max_pool_backward import max_pool2d_backward
from compile_callbacks.passes.testing import check_pass
from tests.support.models import Wrapper

pytestmark = pytest.mark.usefixtures("no_codegen")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Half(Wrapper):
    """Runs a module under autocast."""

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.net(x)


def on(device, kind):
    """A pass that acts on one type of device; on a CPU, its operator is its reference."""
    graph_pass = kind()
    graph_pass.devices = (device,)
    return graph_pass


def images(device):
    return torch.randn(4, 16, 8, 8, device=device).to(memory_format=torch.channels_last)


def check(graph_pass, module, x, **kwargs):
    module = module.to(x.device, memory_format=torch.channels_last)
    result = check_pass(graph_pass, Half(module), x, **kwargs)
    result.assert_close(rtol=3e-2, atol=3e-2)  # bfloat16, of values about 1
    return result.ops_after


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [(3, 2, 1), (2,), (3, 1, 1), ((3, 2), (2, 3), (1, 0))], ids=["3 by 2", "2", "3 by 1", "uneven"]
)
def test_the_gradient_of_a_max_pooling(settings, device):
    module = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.MaxPool2d(*settings))
    ops = check(on(device, TritonMaxPoolBackward), module, images(device), phase="train")
    assert (ops[str(max_pool2d_backward)], ops["aten.max_pool2d_with_indices_backward.default"]) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 64, 100])
@pytest.mark.parametrize("size", [(112, 112), (7, 9), (1, 33)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_the_triton_kernel_of_max_pooling_equals_its_reference(channels, size, ceil_mode):
    x = torch.randn(5, channels, *size, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    pool = nn.MaxPool2d(3, 2, 1, ceil_mode=ceil_mode)
    out = torch.compile(pool, options={"post_grad_custom_post_pass": TritonMaxPoolBackward()})(x)
    grad_output = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, x, grad_output)
    (expected,) = torch.autograd.grad(pool(x), x, grad_output)
    torch.testing.assert_close(actual, expected)
