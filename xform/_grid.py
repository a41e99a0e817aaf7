"""What a kernel does at each point of its grid.

A kernel's body is one program for all points; what its branches and loops do at a point follows
from the point's place (`pl.program_id`), as far as they read nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xform._compat import jaxpr_as_fun
from xform._program import Node, Value, array_bytes, content_at

# Of more points none is looked at by itself.
_MANY = 2**20


def size_of(node: Node) -> int:
    """The number of points."""
    return math.prod(int(n) for n in node.eqn.params["grid_mapping"].grid)


def places(node: Node) -> tuple[np.ndarray, ...] | None:
    """The places of all points along each axis of a grid, the last axis running fastest."""
    grid = tuple(map(int, node.eqn.params["grid_mapping"].grid))
    if not grid or not 0 < math.prod(grid) <= _MANY:
        return None
    return np.unravel_index(np.arange(math.prod(grid), dtype=np.int32), grid)


def at_each(value: Value, at: Sequence[np.ndarray]) -> np.ndarray | None:
    """What a scalar is at each point; None if it reads what no place tells."""

    def one(*place):
        def known(node: Node) -> Any:
            return place[node.eqn.params["axis"]] if node.name == "program_id" else None

        return content_at(value, known)

    if one(*(int(x[0]) for x in at)) is None:
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(one)(*at))


def blocks_moved(node: Node) -> int:
    """Bytes of the blocks that a kernel's pipeline fetches and stores.

    A block is moved when its index changes from one point of the grid to the next; at every point
    where the index depends on more than the point.
    """
    mapping, at, moved = node.eqn.params["grid_mapping"], places(node), 0
    points = size_of(node)
    for block in mapping.block_mappings:
        shape = [getattr(n, "block_size", n) for n in block.block_shape]
        size = math.prod(n if isinstance(n, int) else 1 for n in shape)
        index, changes = block.index_map_jaxpr, points
        if at is not None and len(index.invars) == len(at):
            found = jax.vmap(jaxpr_as_fun(index))(*(np.asarray(c, np.int32) for c in at))
            found = np.stack([np.broadcast_to(np.asarray(x), (points,)) for x in found], -1)
            changes = 1 + int(np.any(found[1:] != found[:-1], -1).sum())
        moved += changes * array_bytes(size, block.array_aval.dtype)
    return moved
