"""How the dims of values belong together: what runs along what.

Two dims that one operation walks along side by side are the same *line* of the program, as the
columns of a matrix and of the mean's residual. A dim of size 1 belongs to none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xform._compat import JaxprEqn, Var
from xform.lowering._region import type_of

type Dim = tuple[Var, int]


@dataclass(eq=False)
class Relations:
    """What the rules of equations say, equation after equation.

    Attributes:
      whole: dims that a kernel must have in one piece.
      parts: of these, dims that are part of others, or made of them.
      sums: equations that sum, with the dims of their operand that they sum over.
      offences: equations that no kernel can hold, and why.
    """

    whole: list[Dim] = field(default_factory=list)
    parts: list[Dim] = field(default_factory=list)
    sums: list[tuple[JaxprEqn, tuple[int, ...]]] = field(default_factory=list)
    offences: list[tuple[JaxprEqn, str]] = field(default_factory=list)
    _parent: dict[Dim, Dim] = field(default_factory=dict)

    def same(self, a, i: int, b, j: int) -> None:
        """Dim i of value a and dim j of value b are walked along together."""
        if not (isinstance(a, Var) and isinstance(b, Var)):
            return
        if 1 not in (type_of(a).shape[i], type_of(b).shape[j]):
            self._parent[self.root((a, i))] = self.root((b, j))

    def each(self, pairs: Iterable[tuple[int, int]], a, b) -> None:
        """These dims of a are these of b."""
        for i, j in pairs:
            self.same(a, i, b, j)

    def in_one_piece(self, a, dims: Iterable[int]) -> None:
        """An operation reads across these dims of a value: a row must hold them whole."""
        if isinstance(a, Var):
            self.whole += [(a, i) for i in dims]

    def cut(self, a, dims: Iterable[int]) -> None:
        """These dims of a value are cut or joined to those of another: they are whole, too."""
        dims = list(dims)
        self.in_one_piece(a, dims)
        if isinstance(a, Var):
            self.parts += [(a, i) for i in dims]

    def summed(self, eqn: JaxprEqn, axes: tuple[int, ...]) -> None:
        """An equation sums over these dims of its operand."""
        self.sums.append((eqn, axes))

    def refuse(self, eqn: JaxprEqn, why: str) -> None:
        """An equation can't be part of a kernel."""
        self.offences.append((eqn, why))

    def root(self, dim: Dim) -> Dim:
        """The dim that stands for all that belong together with this one."""
        while (parent := self._parent.get(dim, dim)) != dim:
            self._parent[dim] = self._parent.get(parent, parent)
            dim = parent
        return dim
