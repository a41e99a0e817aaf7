"""How a region ends: sums over rows are finished, on one device or on several that share rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from xform.lowering._block_ops import Block
from xform.lowering._region import Region, type_of


@dataclass(frozen=True)
class Split:
    """Of a device that has some of all rows, the mesh axes that split each line."""

    axes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def first(self, region: Region) -> dict[int, Any]:
        """Of each line the first that is here."""
        return {k: lax.axis_index(axes) * region.sizes[k] for k, axes in self.axes.items()}

    def total(self, x, over: Iterable[int | None]):
        """A sum over these lines, from that of what is here."""
        axes = tuple(axis for k in over if k is not None for axis in self.axes.get(k, ()))
        return lax.psum(x, axes) if axes else x


WHOLE = Split()
"""A device has all rows."""


def all_rows(region: Region, split: Split) -> Block:
    """All rows that are here, as one block."""
    return Block(region, {k: region.sizes[k] for k in region.rows}, split.first(region))


def finished(
    region: Region, results: Sequence, sums: Sequence, args: Sequence, split: Split
) -> list:
    """The results of a region.

    Args:
      region: of which one.
      results: what rows result in.
      sums: over the rows that are here, in as many bits as they were added up in.
      args: the operands.
      split: which rows are here.
    """
    totals = [split.total(x, region.over(i)) for i, x in enumerate(sums)]
    types = (type_of(v).dtype for v in region.finish.invars)
    totals = [x.astype(t) for x, t in zip(totals, types, strict=False)]
    ends = all_rows(region, split).run(region.finish, [*totals, *args])
    return [(ends if late else results)[i] for late, i in region.order]
