"""The code of the guide to passes runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from compile_callbacks.testing import check_pass

DOCS = Path(__file__).parent.parent / "docs"


def test_the_guide_to_passes_runs():
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "passes.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    source = Path(__file__).parent / "the_guide_to_passes.py"  # a pass is known to torch's cache by its source
    for block in blocks:
        exec(compile(block, str(source), "exec"), namespace)
    namespace["test_gelu_is_approximated_in_inference"]()
    result = check_pass(namespace["hard_tanh"], torch.nn.Tanh(), torch.randn(4, 8))
    assert result.changed
    result.assert_close(rtol=0, atol=0.5)
