"""Random numbers that are bitwise the same on every mesh, inside of `shard_map` and out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import mesh_of
from xform.sharding import context, place, random, shardings

SHAPE = (8, 6, 16)


def drawn(draw, mesh, spec, key, dtype=jnp.float32):
    """What devices draw for their parts, as one array."""
    placed = jax.device_put(key, shardings(mesh, P()))
    part = jax.NamedSharding(mesh, spec).shard_shape(SHAPE)
    f = lambda key: draw(random.local_key(key, SHAPE, spec), part, dtype)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=spec))(placed)


uniform, normal = jax.random.uniform, jax.random.normal
bernoulli = lambda key, shape, _: jax.random.bernoulli(key, 0.3, shape)
split = lambda key, shape, dtype: normal(jax.random.split(key, 3)[1], shape, dtype)
folded = lambda key, shape, dtype: normal(jax.random.fold_in(key, 7), shape, dtype)
MESHES = [
    ({"dp": 4, "tp": 2}, P("dp", None, "tp")),
    ({"dp": 2, "pp": 2, "cp": 2}, P(("pp", "dp"), "cp")),
    ({"tp": 2, "ep": 4}, P(None, None, ("tp", "ep"))),
    ({"dp": 1}, P()),
]


@pytest.mark.parametrize("draw", [uniform, normal, bernoulli, split, folded],
                         ids=["uniform", "normal", "bernoulli", "split", "fold_in"])  # fmt: skip
def test_parts_are_bitwise_parts_of_what_one_device_draws(draw):
    key = jax.random.key(5)
    whole = jax.jit(lambda key: draw(key, SHAPE, jnp.float32))(key)
    for axes, spec in MESHES:
        found = drawn(draw, mesh_of(**axes), spec, key)
        np.testing.assert_array_equal(found, whole, err_msg=str(axes))


def test_so_are_numbers_of_other_sizes():
    key = jax.random.key(1)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            found = drawn(normal, mesh_of(dp=4, tp=2), P("dp", "tp"), key, dtype)
            np.testing.assert_array_equal(found, normal(key, SHAPE, dtype))


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**40), st.integers(0, 2**64 - 1))
def test_places_are_counted_in_64_bits(index, stride, start):
    """Arrays of more than 2**32 numbers have no two places of one number."""
    words = lambda n: (jnp.uint32(n >> 32 & 0xFFFFFFFF), jnp.uint32(n & 0xFFFFFFFF))
    high, low = random._add(words(start), random._times(jnp.uint32(index), stride))
    assert (int(high) << 32) + int(low) == (start + index * stride) % 2**64


def test_dropout_drops_the_same_on_every_mesh():
    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)
    key, found = jax.random.key(2), []
    for axes, spec in MESHES:
        mesh = mesh_of(**axes)
        f = lambda x, key, spec=spec: random.dropout(x, 0.25, key, SHAPE, spec)
        f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, P()), out_specs=spec))
        found.append(np.asarray(f(*jax.device_put((x, key), shardings(mesh, (spec, P()))))))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    kept = found[0] != 0
    assert abs(kept.mean() - 0.75) < 0.05
    np.testing.assert_allclose(found[0][kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)


def test_dropout_follows_positions_wherever_a_layout_puts_them():
    """Chunks of the second dimension lie on devices in another order than in the sequence."""
    shape, spec, key = (4, 32, 3), P("dp", "cp"), jax.random.key(2)
    mesh, layout = mesh_of(dp=2, cp=4), context.zigzag(32, 4)

    def drop(x, key):
        positions = {1: layout.positions("cp")}
        return random.dropout(x, 0.25, key, shape, spec, positions=positions)

    f = jax.shard_map(drop, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = jax.jit(f)(*jax.device_put((layout.split(x), key), shardings(mesh, (spec, P()))))
    stays = jax.random.bernoulli(key, 0.75, shape)
    np.testing.assert_array_equal(layout.join(np.asarray(found)) != 0, stays)


def test_parameters_are_bitwise_the_same_however_they_are_split():
    init = lambda key: normal(key, (16, 24))
    whole = jax.jit(init)(jax.random.key(3))
    for axes, spec in [({"dp": 4, "tp": 2}, P(("tp", "dp"))), ({"pp": 2, "cp": 2}, P("cp", "pp"))]:
        at = shardings(mesh_of(**axes), spec)
        np.testing.assert_array_equal(jax.jit(init, out_shardings=at)(jax.random.key(3)), whole)


def test_rows_go_where_they_belong_and_keep_their_order():
    rows = {"tokens": np.arange(24).reshape(8, 3), "labels": np.arange(8)}
    for axes, spec in [({"dp": 8}, P("dp")), ({"dp": 2, "tp": 4}, P("dp")), ({"cp": 1}, P())]:
        placed = place(rows, shardings(mesh_of(**axes), spec))
        jax.tree.map(np.testing.assert_array_equal, placed, rows)
    part = place(rows, shardings(mesh_of(dp=2, tp=4), P("dp")))["labels"].addressable_shards[5]
    np.testing.assert_array_equal(part.data, [4, 5, 6, 7])


def test_what_does_not_fit_is_named():
    mesh, key = mesh_of(dp=4, tp=2), jax.random.key(0)
    with pytest.raises(ValueError, match=r"parts of shape \(2, 6, 16\) was asked for \(2, 6\)"):
        drawn(lambda key, *_: normal(key, (2, 6)), mesh, P("dp"), key)
    with pytest.raises(ValueError, match=r"positions of shapes \{1: \(3,\)\} .* part \(2, 6, 16\)"):
        drawn(
            lambda *_: random.local_key(key, SHAPE, P("dp"), positions={1: jnp.arange(3)}),
            mesh, P("dp"), key,
        )  # fmt: skip
    f = lambda key: normal(random.local_key(key, SHAPE, P(None, "dp")), (1,))
    f = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"\(8, 6, 16\) can't be split by .*into \(1, 4, 1\)"):
        f(jax.device_put(key, shardings(mesh, P())))
    with pytest.raises(TypeError, match=r"needs a threefry key, .*; found a key of rbg"):
        drawn(normal, mesh, P("dp"), jax.random.key(0, impl="rbg"))
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=r"rate of at least 0 and below 1; found rate=1.5"):
        random.dropout(x, 1.5, key, SHAPE, P())
