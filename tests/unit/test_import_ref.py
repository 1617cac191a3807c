"""Import references, as settings files have them."""

from __future__ import annotations

import math

import pytest

from compile_callbacks._utils.import_ref import resolve


@pytest.mark.parametrize("reference", ["math:sqrt", "math.sqrt"])
def test_resolve_imports_by_both_forms(reference):
    assert resolve(reference) is math.sqrt


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere:fast", "No module named 'nowhere'"),
        ("math:sqrtt", "has no attribute 'sqrtt'; did you mean 'sqrt'?"),
        ("math:sqrt:sin", "invalid format"),
        ("math:a b", "invalid format"),
    ],
)
def test_resolve_names_the_reference_and_the_reason(reference, reason):
    with pytest.raises(ValueError, match=f"'{reference}' cannot be imported") as caught:
        resolve(reference)
    assert reason in str(caught.value)


def test_resolve_shows_the_import_error_of_the_module_itself(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="No module named 'no_such_dependency'"):
        resolve("needs_more.Pass")
