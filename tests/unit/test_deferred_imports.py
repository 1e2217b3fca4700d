"""Test that modules are postponed, and imported when they are asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pipeedge.base.deferred_imports import postponed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package that imports one of its modules in each of two ways, and return its name."""
    folder = tmp_path / "eager_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from eager_package import costly\nimport eager_package.inner.costly as also\ndel also\n"
    )
    (folder / "costly.py").write_text("value = 1\n")
    (folder / "inner" / "__init__.py").touch()
    (folder / "inner" / "costly.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("", ".costly", ".inner", ".inner.costly"):
        monkeypatch.delitem(sys.modules, f"eager_package{name}", raising=False)
    return folder.name


def test_a_postponed_module_is_imported_when_somebody_asks(package: str) -> None:
    names = (f"{package}.costly", f"{package}.inner.costly", f"{package}.unknown")
    with postponed(names):
        imported = importlib.import_module(package)
        assert not hasattr(imported.costly, "value")
    assert not set(names) & set(sys.modules)
    assert not hasattr(imported, "costly")
    assert [importlib.import_module(name).value for name in names[:2]] == [1, 2]
    assert imported.costly.value == 1


def test_a_module_that_is_there_is_not_postponed(package: str) -> None:
    costly = importlib.import_module(f"{package}.costly")
    with postponed((f"{package}.costly",)):
        assert importlib.import_module(f"{package}.costly") is costly
    assert sys.modules[f"{package}.costly"] is costly
