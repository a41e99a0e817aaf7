"""What the backward kernels make of a tile of scores: weights again, and their cotangents.

    P' = exp2(S' - base) norm      dS' = P' (dP' + delta) slope

`slope` is the derivative of the user's score by the product of a query and a key. What else a score
mod reads has a derivative too: `dS'` with that in the place of `slope` is its cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def weights(call: Call, t_tile, partial, place: Place, values: Sequence, per_query: Callable):
    """The weights of a tile, 0 where hidden.

    Args:
      call, partial, place, values: as above, and whether the mask is needed.
      t_tile: exponents of 2.
      per_query: `base`, `norm` or `delta` over the tile.
    """
    p = jnp.exp2(t_tile - per_query("base")) * per_query("norm")
    # A row whose cotangent was not finite has such a delta, and tells by it.
    hide = lambda p: jnp.where(call.visible(place, values), p + 0 * per_query("delta"), 0.0)
    return where_partial(call, partial, p, hide)


def seen(call: Call, partial, p, x) -> jax.Array:
    """`x`, and 0 where the weight is: what that multiplies counts for nothing, NaN included."""
    return where_partial(call, partial, x, lambda x: jnp.where(p == 0.0, 0.0, x))


def where_partial(call: Call, partial, x, masked: Callable):
    """`masked(x)` where the tile is partial; None is for never."""
    never = partial is None or not call.masked
    return x if never else lax.cond(partial, masked, lambda x: x, x)
