"""The forward kernel over millions of tiles: what is read once in a million wrongly shows here."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from xform import causal, documents, flex_attention, which

HEADS, LENGTH, SIZE = 4, 768, 64
BIAS = jax.random.normal(jax.random.key(7), (HEADS, LENGTH, LENGTH), jnp.bfloat16)
TABLE = jax.random.normal(jax.random.key(8), (HEADS, 2 * LENGTH))
OF_KEYS = jax.random.normal(jax.random.key(9), (HEADS, LENGTH))
MODS = {
    "bias of pairs": {"score_mod": lambda s, b, h, q, k: s + BIAS[h, q, k]},
    "bias of pairs in float32": {
        "score_mod": lambda s, b, h, q, k: s + BIAS.astype(jnp.float32)[h, q, k]
    },
    "table": {
        "score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH],
        "mask_mod": causal(),
    },
    "of keys, in documents": {
        "score_mod": lambda s, b, h, q, k: s + OF_KEYS[h, k],
        "mask_mod": documents(jnp.arange(LENGTH) // 500),
    },
}
RUNS = 20


@pytest.mark.parametrize("format", [None, "e4m3"])
@pytest.mark.parametrize("name", MODS)
def test_twenty_runs_are_right_and_the_same(name, format):
    shape, options = (512, LENGTH, HEADS, SIZE), {**MODS[name], "format": format}
    heads = [jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n in range(3)]
    assert which(*heads, **options).name == "mosaic_gpu"
    run = jax.jit(partial(flex_attention, **options))
    judge = {**options, "implementation": "reference"}

    @jax.jit
    def furthest(found):
        """From attention in float32, an entry after another: all of them take 5 GB of scores."""

        def one(entry):
            *entry, found = (x.astype(jnp.float32)[None] for x in entry)
            return jnp.abs(flex_attention(*entry, **judge) - found).max()

        return jax.lax.map(one, (*heads, found)).max()

    first = run(*heads)
    close = 0.03 if format is None else 0.6
    with jax.default_matmul_precision("highest"):
        assert furthest(first) < close
    same = jax.jit(jnp.array_equal)
    assert all(bool(same(first, run(*heads))) for _ in range(RUNS))
