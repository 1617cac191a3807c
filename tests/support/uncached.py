"""Passes that keep torch's cache out of a test."""

from __future__ import annotations

import time

import torch

from compile_callbacks import GraphPass


class Uncached(GraphPass):
    """Changes nothing; has torch leave its cache alone, so that every compile is a real one."""

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        pass

    def uuid(self) -> None:
        return None


class Slow(Uncached):
    """Takes this time for each graph."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        time.sleep(self.seconds)
