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


def test_weights_are_dropped_at_the_rate_and_the_mean_is_kept():
    key, index = jnp.array([3, 5], jnp.uint32), jnp.arange(300)
    at = jax.vmap(jax.vmap(lambda q, k: kept(key, 0.3, 1, 2, q, k), (None, 0)), (0, None))
    found = at(index, index)
    assert abs(float((found == 0).mean()) - 0.3) < 0.005
    assert abs(float(found.mean()) - 1) < 0.01
