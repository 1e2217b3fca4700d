"""Modules that another one imports but hardly ever needs: left out at first, imported when needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["META_KERNELS", "import_postponed", "postponed"]

META_KERNELS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that teach torch the shapes of results of operators that it has only in Python, for tracing and for
computing on ``meta``. Importing torch spends a fifth of its time on them. Other parts of torch cannot be
imported before them, so whoever imports more than torch itself does calls ``import_postponed`` first.
"""


class _Postponed(MetaPathFinder, Loader):
    """Finder of empty modules in place of some."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.empty: dict[str, ModuleType] = {}
        """Modules that were imported as empty ones, by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of an empty module if ``fullname`` is to be postponed."""
        return ModuleSpec(fullname, self) if fullname in self._names else None

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""
        self.empty[module.__name__] = module


@contextmanager
def postponed(names: Sequence[str]) -> Iterator[None]:
    """Let the body import empty modules in place of ``names``; the next import of them is a real one.

    Args:
        names: Full names of modules. Those that are imported already, or that nothing imports, do no harm.
    """
    finder = _Postponed(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in finder.empty.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, attribute = name.rpartition(".")
            package = sys.modules.get(parent)
            if package is not None and vars(package).get(attribute) is module:
                delattr(package, attribute)


def import_postponed() -> None:
    """Import the kernels of torch that were postponed, if torch is there without them."""
    if "torch" in sys.modules:
        for name in META_KERNELS:
            import_module(name)
