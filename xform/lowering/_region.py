"""What `fuse` hands to a lowering: a program over rows, and what is summed over them at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xform._compat import Jaxpr, Literal, Var

type Lines = tuple[int | None, ...]
"""Of each dim of a value the line that it runs along, None where its size is 1."""


def type_of(value: Var | Literal) -> Any:
    """The type of an array of a program: its shape and dtype."""
    return value.aval


@dataclass(frozen=True)
class Sum:
    """A sum over rows, of a value that the body computes.

    Attributes:
      axes: the dims of that value that are summed over, whether rows or not.
    """

    axes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Region:
    """A program in which rows have nothing to do with each other, until it ends.

    A *line* is what dims of several values run along together. Lines are rows, whose entries are
    independent, or within a row.

    Attributes:
      body: from the operands to what rows result in, and then to what is summed over rows.
      lines: of each value of the body its dims' lines.
      sizes: of each line.
      rows: the lines that are rows, the outermost first.
      sums: one for each of the last results of the body.
      finish: from the sums, and the operands, to the other results.
      order: of each result of the whole, whether `finish` makes it, and which of the results of
        `finish` or of the body it is.
    """

    body: Jaxpr
    lines: Mapping[Var, Lines]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    sums: tuple[Sum, ...]
    finish: Jaxpr
    order: tuple[tuple[bool, int], ...]

    @cached_property
    def results(self) -> list:
        """What rows result in."""
        return self.body.outvars[: len(self.body.outvars) - len(self.sums)]

    @cached_property
    def summed(self) -> list:
        """What is summed over rows."""
        return self.body.outvars[len(self.results) :]

    def over(self, i: int) -> list[int | None]:
        """The lines that the i-th sum is over."""
        lines = self.lines_of(self.summed[i])
        return [lines[d] for d in self.sums[i].axes]

    def kept(self, i: int) -> Lines:
        """The lines of the i-th sum's result."""
        lines = self.lines_of(self.summed[i])
        return tuple(k for d, k in enumerate(lines) if d not in self.sums[i].axes)

    @cached_property
    def width(self) -> int:
        """The number of elements of the widest value of one row."""
        return max((self.width_of(v) for v in self.values), default=1)

    def width_of(self, value: Var) -> int:
        """The number of elements of one row of a value."""
        within = (line for line in self.lines[value] if line is not None and line not in self.rows)
        return math.prod(self.sizes[line] for line in within)

    def shape(self, value: Var | Literal) -> tuple[int, ...]:
        """Of a whole value."""
        return tuple(1 if line is None else self.sizes[line] for line in self.lines_of(value))

    @cached_property
    def values(self) -> list[Var]:
        """All values of the body."""
        made = [v for eqn in self.body.eqns for v in eqn.outvars]
        return [*self.body.constvars, *self.body.invars, *made]

    def lines_of(self, atom: Var | Literal) -> Lines:
        """Of an atom of the body; a literal is a number."""
        return () if isinstance(atom, Literal) else self.lines[atom]
