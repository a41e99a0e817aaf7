"""`which` says what of a mask defeats the analysis of tiles, at which line, and what it costs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives.attention import which
from xform.primitives.block_map import undecided
from xform.primitives.masks import causal, dilated, documents, full, neighborhood, sliding_window

T = 700
x = jnp.ones((1, T, 2, 8))
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 9, T))
UNSORTED = jnp.asarray(np.random.default_rng(0).permutation(T))
HERE = rf"\(at {re.escape(__file__)}:\d+ \(<lambda>\)\)"
CORNERS = "is not within a tile what it is at its corners"
LESS = "is known less well than what it is made of"


def why(mask, **options):
    return which(x, x, x, mask_mod=mask, implementation="blockwise", **options).why


def random(b, h, q, k):
    return jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), q * 999 + k), 0.001)


DEFEATED = {
    "modular": (lambda b, h, q, k: (q - k) % 900 == 30, f"`%` {HERE} {CORNERS}"),
    "modular, in a mask object": (
        causal() & dilated(900).shift(q=30), rf"`%` \(in `dilated`\) {CORNERS}"),
    "a hash of one's own": (
        lambda b, h, q, k: ((q * 0x3779B9) ^ (k * 0x5EBCA6B)) >> 7 == 3, rf"`\*` {HERE} {LESS}"),
    "a hash that mixes bits": (lambda b, h, q, k: ((q ^ k) & 255) == 77, rf"`\^` {HERE}"),
    "random": (random, r"`random_fold_in` \(at .*random\)\) makes values without an order"),
    "a sine": (lambda b, h, q, k: jnp.sin(q * 0.1) * 30 > k, f"`sin` {HERE} {LESS}"),
    "a loop": (
        lambda b, h, q, k: jax.lax.fori_loop(0, q % 3, lambda _, n: n + k, 0) > 9000,
        rf"`while` {HERE}"),
    "parts that depend on each other": (
        lambda b, h, q, k: (q >= k) & (q < k), f"`&` {HERE} {LESS}"),
    "ids in any order": (
        lambda b, h, q, k: UNSORTED[q] == 650 - UNSORTED[k] // 8,
        rf"`array\[index\]` {HERE} {CORNERS}"),
    "our own": (documents(UNSORTED // 70), r"`array\[index\]` \(in `documents`\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFEATED)
def test_the_part_that_defeats_it(name):
    mask, part = DEFEATED[name]
    text = why(mask)
    assert re.search(part, text), text
    assert "evaluated pair by pair before the call" in text


def test_the_cost_is_counted():
    """The tiles are those that the map evaluates; their pairs follow."""
    mask = lambda b, h, q, k: (q - k) % 900 == 30
    text = why(mask)
    count, of, rows, cols, pairs, maps = (
        int(n.replace(",", ""))
        for n in re.search(
            r"([\d,]+) of ([\d,]+) tiles of (\d+) x (\d+) .* ([\d,]+) pairs of \d+ operations each "
            r"for each of (\d+) maps, in [\d.]+ MB of memory", text
        ).groups()
    )  # fmt: skip
    i = jnp.int32(0)
    sizes = {"q_len": T, "kv_len": T, "q_tile": rows, "kv_tile": cols}
    open_ = undecided(jax.make_jaxpr(mask)(i, i, i, i).jaxpr, (), b=0, h=0, **sizes)
    assert (count, of) == (int(open_.sum()), open_.size)
    assert 0 < count < of
    assert pairs == count * rows * cols
    assert maps == 2, "one for each head, which are not attended to together"
    assert f"{pairs / T / T:.0%} of all pairs" in text


@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        full(),
        sliding_window(100, right=7) & causal(),
        causal() & documents(jnp.arange(T) // 70),
        dilated(3),
        neighborhood((20, 35), 5).shift(q=0),
    ],
    ids=repr,
)
def test_a_mask_that_is_decided_costs_nothing(mask):
    assert why(mask) == why(None) or "neighborhood" in repr(mask)
    small = jnp.ones((1, 30, 2, 8))  # one tile needs no map
    noise = lambda b, h, q, k: jnp.sin(q * 0.1) > 0.5
    assert which(small, small, small, mask_mod=noise).why == which(small, small, small).why


def test_masks_of_traced_arrays():
    """What may defeat the analysis is named; nothing can be counted."""
    said = []

    def f(ids, step):
        mask = documents(ids) & dilated(step) & (lambda b, h, q, k: jnp.sin(q * 0.1) > ids[k])
        said.append(why(mask))
        said.append(why(documents(ids) & causal()))
        return ids

    jax.eval_shape(f, IDS, 3)
    both = r"`%` \(in `dilated`\) and `sin` \(at .*<lambda>\)\) may not be known"
    assert re.search(both, said[0]), said[0]
    assert f"up to {2 * T * T:,} pairs" in said[0]
    alone = (
        r"in `mask_mod`, `array\[index\]` \(in `documents`\) is known well only if the values come"
    )
    assert re.search(alone, said[1]), said[1]
    assert re.search(r"\(in `documents`\) and .*at .*<lambda>\)\) is known well only", said[0])
