"""Docstrings as pages show them: an example, `>>> …`, is a block of code."""

import copy
import re
from typing import Any

import griffe

PART = r"^[ ]*>>> .*(?:\n[ ]*\S.*)*"  # to the next empty line
EXAMPLE = re.compile(rf"{PART}(?:\n[ ]*\n{PART})*", re.MULTILINE)
MADE = re.compile(r"(_\w+)\(\)")


class Examples(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each function, class, module and constant."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called for each module: a value `remat = _Remat()` is the function that it serves as."""
        for name, member in list(mod.members.items()):
            made = isinstance(member, griffe.Attribute) and MADE.fullmatch(str(member.value))
            if made and made[1] in mod.members:
                function: Any = copy.copy(mod[f"{made[1]}.__call__"])
                function.name = name
                function.parameters = griffe.Parameters(*list(function.parameters)[1:])  # no `self`
                mod.set_member(name, function)


def fenced(example: re.Match) -> str:
    """Returns an example as a block."""
    lines = [re.sub(r"\s*# doctest: .*", "", line) for line in example[0].splitlines()]
    margin = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return "\n".join([f"{margin}```pycon", *lines, f"{margin}```"])
