"""`decode_attention`, `paged_attention`: a few queries against many keys that are kept.

Both are `flex_attention` on parts of the keys, whose results are merged by their log-sum-exps
(`merge`), which is exact. Mods are called with the positions in the text, wherever a key is stored,
so that one mask serves training, decoding and paging. What no query sees is not read: a step costs
what its keys cost, not what the cache could hold.

On NVIDIA's Hopper one kernel takes all parts side by side (`_by_kernel`), from pages where they
lie; elsewhere they follow one another (`_kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from xform.lowering._contract import wide_of
from xform.primitives._attention_checks import (
    check_arguments,
    check_mods,
    check_places,
    of_pairs,
)
from xform.primitives._by_kernel import by_kernel
from xform.primitives._kept import Cache, both, in_parts, named
from xform.primitives._kept import merge as merge
from xform.primitives._objects import Shape, in_text
from xform.primitives._rules import check_sizes, from_numpy
from xform.primitives.attention import Aux, _with_sinks


def decode_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k: Float[Array | np.ndarray, "B S K D"],
    v: Float[Array | np.ndarray, "B S K V"],
    lengths: ArrayLike,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    aux: Sequence[str] = (),
    splits: int | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns attention of the newest tokens of some texts over a cache of their keys.

    The T queries are the last of `lengths[b]` tokens, whose keys are in the cache, their own too:
    query t stands at position `lengths[b] - T + t`. Mods are called with positions, and nothing is
    hidden but what is not there: with T > 1 a language model needs `mask_mod=causal()`. What lies
    behind a text's end has no influence, NaN included; all else is as in `flex_attention`. Arrays
    of masks and scores by position have the S of them that there is room for.

    Args:
      q: queries.
      k, v: the cache, with room for S keys.
      lengths: how many tokens each text has, integers `[B]` or a scalar, at most S; where they are
        traced, and can't be looked at, a text of more gives NaN.
      score_mod, mask_mod, scale, sinks: as of `flex_attention`, on positions.
      aux: names of further results: "lse".
      splits: how many pieces of the keys are attended to side by side, part after part; None
        chooses for the default device, on a Hopper a kernel. It changes the order of sums, and
        nothing else.
      implementation: as of `flex_attention`.

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on shapes, dtypes or mods that do not fit.

    >>> from xform.primitives.masks import causal, sliding_window
    >>> q, cache = jnp.ones((2, 1, 8, 16)), jnp.ones((2, 100, 4, 16))
    >>> mask = causal() & sliding_window(32)
    >>> decode_attention(q, cache, cache, jnp.array([7, 60]), mask_mod=mask).shape
    (2, 1, 8, 16)
    """
    aux = (aux,) if isinstance(aux, str) else tuple(aux)
    q, k, v, sinks = from_numpy(q, k, v, sinks)
    check_arguments(q, k, v, sinks, 0.0, None, (), implementation, caller="decode_attention")
    options = {"scale": scale, "sinks": sinks, "aux": aux, "splits": splits}
    return _over_keys(
        "decode_attention", q, Cache(k, v, lengths), score_mod, mask_mod, options, implementation
    )


def paged_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k_pages: Float[Array | np.ndarray, "P N K D"],
    v_pages: Float[Array | np.ndarray, "P N K V"],
    page_table: Int[Array, "B M"],
    lengths: ArrayLike,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    aux: Sequence[str] = (),
    splits: int | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns attention of the newest tokens of some texts over keys that are kept in pages.

    Position p of text b is entry `p % N` of page `page_table[b, p // N]`. A page number that is
    negative or not below P is a hole: there are no keys. Pages may be shared, and lie in any
    order; what no text has of them has no influence, NaN included. Gradients of pages add up what
    all texts give. All else is as in `decode_attention`.

    Pages are gathered for some positions at a time, and only where a query sees one of them.

    Args:
      q: queries, the last T of `lengths[b]` tokens.
      k_pages, v_pages: P pages of N keys and values each.
      page_table: the pages of each text, with room for M.
      lengths: how many tokens each text has, as of `decode_attention`, at most `M N`.
      score_mod, mask_mod, scale, sinks: as of `flex_attention`, on positions.
      aux: names of further results: "lse".
      splits: as of `decode_attention`.
      implementation: as of `flex_attention`.

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on shapes, dtypes or mods that do not fit.

    >>> q, pages = jnp.ones((2, 1, 8, 16)), jnp.ones((9, 32, 4, 16))
    >>> table = jnp.array([[3, 0, -1], [8, 3, 5]])
    >>> paged_attention(q, pages, pages, table, jnp.array([40, 96])).shape
    (2, 1, 8, 16)
    """
    aux = (aux,) if isinstance(aux, str) else tuple(aux)
    q, k_pages, v_pages, sinks = from_numpy(q, k_pages, v_pages, sinks)
    check_sizes("paged_attention", q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    _check_pages(q, k_pages, v_pages, page_table)
    size, room = k_pages.shape[1], page_table.shape[1]
    rows = lambda x: jax.ShapeDtypeStruct((q.shape[0], room * size, *x.shape[2:]), x.dtype)
    check_arguments(
        q, rows(k_pages), rows(v_pages), sinks, 0.0, None, (), implementation,
        caller="paged_attention",
    )  # fmt: skip
    options = {"scale": scale, "sinks": sinks, "aux": aux, "splits": splits}
    cache = Cache(k_pages, v_pages, lengths, jnp.asarray(page_table))
    return _over_keys("paged_attention", q, cache, score_mod, mask_mod, options, implementation)


def _check_pages(q, k_pages, v_pages, table) -> None:
    """Raises if pages and their table do not fit together, or the queries."""
    wrong = []
    if table.ndim != 2 or q.ndim != 4 or table.shape[0] != q.shape[0]:
        batch = q.shape[0] if q.ndim == 4 else "B"
        wrong.append(
            f"`page_table` has shape {table.shape}; with q {q.shape} needed is [{batch}, M], the "
            "pages of each text"
        )
    if not jnp.issubdtype(table.dtype, jnp.integer):
        wrong.append(f"`page_table` has dtype {table.dtype}; needed are integers, page numbers")
    if k_pages.ndim != 4 or k_pages.shape[:3] != v_pages.shape[:3] or not k_pages.shape[1]:
        wrong.append(
            f"`k_pages` has shape {k_pages.shape} and `v_pages` {v_pages.shape}; needed are "
            "[P, N, K, D] and [P, N, K, V], P pages of N > 0 keys"
        )
    if wrong:
        raise ValueError(f"paged_attention: {'; '.join(wrong)}.")


def _over_keys(
    caller: str, q, cache: Cache, score_mod, mask_mod, options: dict, implementation: str | None
):
    """Attends to kept keys: by one kernel where one takes the call, else to part after part."""
    new, room, sinks = q.shape[1], cache.room, options["sinks"]
    lengths, known = _lengths(caller, cache.lengths, q.shape[0], room)
    cache = cache._replace(lengths=lengths)
    if unknown := [name for name in options["aux"] if name != "lse"]:
        raise ValueError(f"{caller}: `aux` asks for {unknown}; there is ['lse'].")
    # Queries and keys are counted from the beginning of a text: each has any of its positions.
    shape = Shape(q.shape[0], q.shape[2], room, room)
    with in_text():
        check_mods(score_mod, mask_mod, options["scale"], shape, caller)
        score_mod, mask_mod = of_pairs((*q.shape[:3], room), score_mod, mask_mod)
        check_places(q, score_mod, mask_mod, shape, caller)
    scale = max(1, q.shape[-1]) ** -0.5 if options["scale"] is None else options["scale"]
    score = score_mod and named(partial(_score, lengths, new, score_mod), score_mod)
    seen = named(partial(_seen, lengths, new, mask_mod), mask_mod)
    # One query that is there sees what it sees.
    own = None if mask_mod is None and new == 1 else seen
    dtype = q.dtype if sinks is None else wide_of(q.dtype)
    if options["splits"] is None and (
        found := by_kernel(q, cache, score, own, scale, dtype, implementation)
    ):
        out, lse = found
    else:
        out, lse = in_parts(
            q, cache, score, named(partial(_there, cache, seen), mask_mod),
            scale=scale, splits=options["splits"], implementation=implementation,
        )  # fmt: skip
        if not known:
            out, lse = cache.checked(out, lse)
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    out = out.astype(q.dtype)
    return (out, Aux(lse=lse)) if options["aux"] else out


def _lengths(caller: str, lengths, batch: int, room: int):
    """Lengths `[B]`, and whether they are known, and not beyond what there is room for."""
    given, lengths = lengths, jnp.asarray(lengths)
    if lengths.shape not in ((), (batch,)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{caller}: `lengths` is {lengths.dtype}{list(lengths.shape)}; needed are integers, a "
            f"scalar or [{batch}]."
        )
    of_each = jnp.broadcast_to(lengths.astype(jnp.int32), (batch,))
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        return of_each, False
    known = np.ravel(given) if getattr(given, "is_fully_addressable", True) else np.zeros(0, int)
    if (wrong := known[(known < 0) | (known > room)]).size:
        raise ValueError(
            f"{caller}: `lengths` has {', '.join(map(str, wrong[:5]))}, and there is room for the "
            f"keys of {room} tokens: needed are numbers from 0 to {room}, or more room."
        )
    return of_each, True


def _score(lengths, new: int, score_mod, s, b, h, t, position):
    """The score of the t-th of the new queries at a position."""
    with in_text():
        return score_mod(s, b, h, lengths[b] - new + t, position)


def _seen(lengths, new: int, mask_mod, b, h, t, position):
    """Whether the t-th of the new queries sees a position, if there is a key."""
    place = lengths[b] - new + t
    if mask_mod is None:
        return place >= 0
    with in_text():
        return both(place >= 0, mask_mod(b, h, place, position))


def _there(cache: Cache, seen, b, h, t, position):
    """Whether there is a key, and it is seen."""
    return both(cache.has(b, position), seen(b, h, t, position))
