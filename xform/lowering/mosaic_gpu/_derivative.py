"""What the backward kernels make of a tile of scores: weights again, and their cotangents.

    P' = exp2(S' - base) norm      dS' = P' (dP' + delta) slope

`slope` is the derivative of the user's score by the product of a query and a key. What else a score
mod reads has a derivative too: `dS'` with that in the place of `slope` is its cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu._call import LOG2E, Call, Place


def modified(call: Call, s_tile, place: Place, values: Sequence) -> tuple:
    """Scores as exponents of 2, their derivative by the product (None for its scale), and others.

    Args:
      call: its score program returns the score and its derivatives.
      s_tile: the product of keys and queries.
      place, values: of the tile, as of `Call.run`.
    """
    programs = call.programs
    if programs.score is None:
        return s_tile * (programs.scale * LOG2E), None
    t_tile, *slopes = call.run_all(programs.score, place, values, s_tile * programs.scale)
    return t_tile * LOG2E, *slopes


def weights(
    call: Call, t_tile, slopes: list, partial, place: Place, values: Sequence, per_query
) -> tuple:
    """The weights of a tile and the derivatives of its scores, 0 where hidden.

    Args:
      call, partial, place, values: as above, and whether the mask is needed; None is for never.
      t_tile: exponents of 2.
      slopes: derivatives; None for one that is a number.
      per_query: `base` or `norm` over the tile.
    """
    p = jnp.exp2(t_tile - per_query("base")) * per_query("norm")
    if partial is None or not call.masked:
        return p, slopes

    def hide(tiles):
        visible = call.visible(place, values)
        return jax.tree.map(lambda x: jnp.where(visible, x, 0.0), tiles)

    return lax.cond(partial, hide, lambda tiles: tiles, (p, slopes))


def seen(call: Call, partial, p, x) -> jax.Array:
    """`x`, and 0 where the weight is: what that multiplies counts for nothing, NaN included."""
    if partial is None or not call.masked:
        return x
    return lax.cond(partial, lambda x: jnp.where(p == 0.0, 0.0, x), lambda x: x, x)
