from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.sharding import make_mesh, place, settle, shardings
from xform.train.data import NO_LABEL, Rows
from xform.train.replay import Corruption, check, differences, only_on

WEIGHTS = jax.random.normal(jax.random.key(0), (11, 11))


def some_rows(rows: int) -> Rows:
    tokens = np.random.default_rng(0).integers(11, size=(rows, 6)).astype(np.int32)
    labels = np.where(tokens % 4 == 0, NO_LABEL, tokens[:, ::-1]).astype(np.int32)
    return Rows(tokens, tokens, labels)


def gradients(replicas: int, broken: tuple[int, ...] = ()):
    """Gradients of a loss over replicas, of which some compute wrongly: in the last bits."""
    mesh = make_mesh(dp=replicas, devices=jax.devices()[:replicas])

    def body(weights, tokens, labels):
        def loss(weights):
            scores = jax.nn.log_softmax(weights[tokens])
            picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
            return -jnp.sum(jnp.where(labels == NO_LABEL, 0.0, picked))

        own = jax.lax.pcast(weights, "dp", to="varying")
        grads = jax.grad(loss)(own)
        at = jax.lax.axis_index("dp")
        wrong = jnp.any(at == jnp.array([*broken, -1]))
        grads = jnp.where(wrong & (at > 0), grads * (1 + 1e-6), grads)
        grads = jnp.where(wrong & (at == 0), grads * (1 - 1e-6), grads)
        return jax.lax.psum(grads, "dp")

    P = jax.P
    step = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=P())
    step = partial(jax.jit(step), jax.device_put(WEIGHTS, shardings(mesh, P())))
    at = shardings(mesh, P("dp"))
    return lambda rows: {"w": settle(step(place(rows.tokens, at), place(rows.labels, at)))}


def test_replicas_that_compute_alike_agree():
    rows = some_rows(8)
    for step in range(4):
        check(gradients(4), rows, 4, step)


def test_every_replica_has_its_turn_and_is_named():
    rows, found = some_rows(8), {}
    for step in range(4):
        try:
            check(gradients(4, broken=(2,)), rows, 4, step)
        except Corruption as error:
            found[step] = str(error)
    assert list(found) == [1, 2], "the turns of replicas 1 and 2, and of 2 and 3"
    for step, words in found.items():
        assert words.startswith(f"step {step}: replicas {step} and {step + 1} differ on the same")
        assert "`w` in " in words
        assert "replica 2 is wrong, by a third one's word" in words


@pytest.mark.parametrize(
    ("replicas", "broken", "words"),
    [(2, (1,), "only a third could tell"), (4, (0, 1), "no two agree as they should")],
)
def test_where_nobody_can_tell_who_is_wrong_that_is_said(replicas, broken, words):
    with pytest.raises(Corruption, match=words):
        check(gradients(replicas, broken), some_rows(8), replicas, 0)


def test_the_rows_of_one_replica_go_to_another():
    rows = some_rows(8)
    moved = only_on(rows, 1, replica=3, replicas=4)
    assert (moved.tokens.reshape(4, 2, 6) == rows.tokens[2:4]).all()
    assert (moved.labels[6:] == rows.labels[2:4]).all()
    assert (moved.labels[:6] == NO_LABEL).all()
    assert (moved.labels[6:] != NO_LABEL).any()


def test_bits_are_compared_and_not_their_meaning():
    one = {"a": jnp.array([0.0, 1.0, jnp.nan]), "b": jnp.ones(3, jnp.bfloat16)}
    two = {"a": jnp.array([-0.0, 1.0, jnp.nan]), "b": jnp.ones(3, jnp.bfloat16)}
    assert differences(one, two) == {}
    two["a"] = two["a"].at[1].set(np.nextafter(np.float32(1), np.float32(2)))
    assert differences(one, two) == {"a": 1}
