"""Versions of packages, as `compile-callbacks doctor` compares them."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from compile_callbacks.cli import package_checks as packages


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", "failed"),
        ("2.11.0rc1", "failed"),
        ("2.11.0.dev20260101", "failed"),
        ("2.11", "ok"),
        ("2.11.0+cpu", "ok"),
        ("2.15.0a0+git1234", "ok"),
    ],
)
def test_check_torch_orders_prereleases_before_the_release(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert packages.check_torch().status == status


@pytest.mark.parametrize(
    ("requirement", "status", "found"),
    [
        ('triton==3.9.0; platform_system == "Linux"', "ok", "3.9, which torch"),
        ("triton (==3.9.0)", "ok", "3.9, which torch"),
        ("triton~=3.9.0", "ok", "3.9, which torch"),
        ("triton==3.9.0+git1", "warning", "asks for ==3.9.0+git1"),
        ("triton==3.10", "warning", "asks for ==3.10"),
        ("triton-nightly==1", "ok", "3.9"),
    ],
)
def test_check_triton_reads_what_torch_requires(monkeypatch, requirement, status, found):
    monkeypatch.setattr(packages, "installed_version", {"triton": "3.9"}.get)
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["sympy>=1.13", requirement])
    check = packages.check_triton()
    assert check.status == status
    assert found in check.found


def test_required_by_torch_is_empty_without_metadata(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    assert not packages.required_by_torch("triton")
    assert not packages.required_by_torch("no-such-package")
