"""The table of tiles, and what fits."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from xform import flex_attention, which
from xform.lowering.mosaic_gpu._attend import programs
from xform.lowering.mosaic_gpu._tuning import (
    LENGTHS,
    MODS,
    SIZES,
    Tiles,
    _table,
    key,
    mods_class,
    tiles_of,
)
from xform.primitives.attention import _traced

TABLE = jnp.ones((200, 512))
IDS = jnp.arange(256) // 100


def parts(score=None, mask=None, rate=0.0):
    """A call's programs."""
    q = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.bfloat16)
    return programs(_traced(q, score, mask, 1.0, rate)[0])


def bands(count: int):
    """A score that looks up `count` tables, each by its own."""

    def score(s, b, h, q, k):
        for n in range(count):
            s = s * TABLE[n, q - k + 256]
        return s

    return score


@pytest.mark.parametrize("device", _table())
def test_every_class_has_tiles_that_fit(device):
    forward = _table()[device]["forward"]
    names = [key(*x) for x in itertools.product(SIZES, LENGTHS, MODS)]
    assert sorted(forward) == sorted(names)
    for name in names:
        size = int(name.split()[0])
        assert Tiles(**forward[name]).fit(size, size), name


@pytest.mark.parametrize(
    ("mods", "name"),
    [
        ({}, "plain"),
        ({"mask": lambda b, h, q, k: q >= k}, "mask"),
        ({"score": lambda s, b, h, q, k: jnp.tanh(s)}, "score"),
        ({"score": lambda s, b, h, q, k: s * TABLE[h, q]}, "score"),
        ({"rate": 0.1}, "vectors"),  # part of its hash belongs to keys
        ({"mask": lambda b, h, q, k: IDS[q] == IDS[k]}, "vectors"),
        ({"score": bands(1)}, "vectors"),
    ],
)
def test_the_class_of_mods(mods, name):
    assert mods_class(parts(**mods)) == name


def test_as_many_vectors_as_fit_compile_and_one_more_is_no_kernel():
    """The largest number that fits is lowered, where Mosaic checks its own count of bytes."""
    fits = {n: _fits(n, 256) for n in range(1, 12)}
    most = max(n for n, fit in fits.items() if fit)
    assert 4 < most < 11
    x = jnp.ones((1, 512, 1, 256), jnp.bfloat16)
    attend = jax.jit(lambda x: flex_attention(x, x, x, score_mod=bands(most)))
    assert "mosaic_gpu" in attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert f"{most + 1} vectors that travel" in which(x, x, x, score_mod=bands(most + 1)).why


def _fits(count: int, size: int) -> bool:
    try:
        tiles_of(parts(score=bands(count)), 512, size, size)
    except NotImplementedError:
        return False
    return True


def test_fewer_keys_a_tile_where_vectors_need_the_room():
    tiles = [tiles_of(parts(score=bands(n)), 512, 128, 128).kv for n in (1, 10, 20, 30)]
    assert tiles[0] == 128
    assert sorted(tiles, reverse=True) == tiles
    assert tiles[-1] == 64
