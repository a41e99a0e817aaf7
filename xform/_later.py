"""Names of a package that are loaded when they are first asked for (PEP 562), to keep it light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def later(
    package: str, table: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns what a package needs for such names: their modules, `__getattr__` and `__dir__`.

    Args:
      package: its name.
      table: of each of its modules the names that are the package's too; none for a module that is
        a name itself.
    """
    modules = {name: module for module, names in table.items() for name in names or (module,)}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        module = import_module(f"{package}.{modules[name]}")
        value = getattr(module, name) if table[modules[name]] else module
        setattr(sys.modules[package], name, value)
        return value

    return modules, get, lambda: sorted({*vars(sys.modules[package]), *modules})
