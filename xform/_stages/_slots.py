"""Slots: arrays with a leading dim for the stages, of which each uses as many as it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform._stages._program import Piece, Program


def part_of(leaf, piece: Piece):
    return leaf if not piece.layered else leaf[piece.start : piece.stop]


def padded(part, slot):
    """A part with zeros behind it, to the length of its slot."""
    short = slot.shape[0] - part.shape[0] if slot.ndim else 0
    return jnp.pad(part, [(0, short), *[(0, 0)] * (part.ndim - 1)]) if short else part


def slots_of(program: Program, pieces: Sequence[Sequence[Piece]]):
    """Types of slots for parameters, and for each stage which slot each piece has."""
    longest: Counter = Counter()
    for piece in (p for of_stage in pieces for p in of_stage if p.layered):
        leaf = program.params[piece.leaf]
        key = leaf.shape[1:], leaf.dtype
        longest[key] = max(longest[key], piece.stop - piece.start)

    def type_of(piece: Piece):
        leaf = program.params[piece.leaf]
        if not piece.layered:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        length = longest[leaf.shape[1:], leaf.dtype]
        return jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype)

    slots, found = places([[type_of(piece) for piece in of_stage] for of_stage in pieces])
    at = [dict(zip(of, where, strict=True)) for of, where in zip(pieces, found, strict=True)]
    return slots, at


def places(types: Sequence[Sequence]) -> tuple[list, list[list[int]]]:
    """As many slots of each type as the longest need, and which slot each has."""
    slots: list[Any] = []
    found: list[list[int]] = []
    by_type: dict[Any, list[int]] = {}
    for row in types:
        used: Counter = Counter()
        at = []
        for t in row:
            key = t.shape, str(t.dtype)
            mine = by_type.setdefault(key, [])
            if used[key] == len(mine):
                mine.append(len(slots))
                slots.append(t)
            at.append(mine[used[key]])
            used[key] += 1
        found.append(at)
    return slots, found
