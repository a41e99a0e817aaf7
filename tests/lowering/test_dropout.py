import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from xform.lowering._dropout import kept, threefry


def test_the_generator_is_that_of_jax():
    words = jax.random.bits(jax.random.key(0), (4, 100))
    for found, known in zip(
        threefry((words[0], words[1]), (words[2], words[3])),
        threefry2x32_p.bind(*words),
        strict=True,
    ):
        assert np.array_equal(found, known)


def test_pairs_whose_flat_positions_agree_in_32_bits_have_bits_of_their_own():
    """A counter of 32 bits would repeat: each pair here is 2^32 after the one before."""
    key, length = jnp.array([3, 5], jnp.uint32), 2**20
    flat = 12345 + np.arange(4000, dtype=np.int64) * 2**32  # of [H, T, S], with T = S = length
    h, q, k = flat // length**2, flat // length % length, flat % length
    assert len(set(k)) == 1
    assert not len(set(q)) == len(set(h)) == 1
    at = jax.vmap(lambda h, q, k: kept(key, 0.5, 0, h, q, k))
    found = at(*(jnp.asarray(x, jnp.int32) for x in (h, q, k)))
    assert abs(float((found == 0).mean()) - 0.5) < 0.03


def test_weights_are_dropped_at_the_rate_and_the_mean_is_kept():
    key, index = jnp.array([3, 5], jnp.uint32), jnp.arange(300)
    at = jax.vmap(jax.vmap(lambda q, k: kept(key, 0.3, 1, 2, q, k), (None, 0)), (0, None))
    found = at(index, index)
    assert abs(float((found == 0).mean()) - 0.3) < 0.005
    assert abs(float(found.mean()) - 1) < 0.01
