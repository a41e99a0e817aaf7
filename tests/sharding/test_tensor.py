"""Tensor parallelism: heads that are fewer than devices, tokens outside, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform.sharding import TensorParallel, data, shardings

ONE = TensorParallel()


def attend(tp, x, query, key, heads: int, D: int = 3):
    """Scores of grouped queries, as one number a query head."""
    q, k = tp.column(x, query, tp.head_columns(key, heads))
    q, k = (y.reshape(*y.shape[:2], -1, D) for y in (q, k))
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return jnp.tanh(jnp.einsum("bthd,bshd->bh", q, k))


@pytest.mark.parametrize(("heads", "n"), [(2, 4), (1, 4), (4, 2)])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_heads_of_keys_may_be_fewer_than_devices(heads, n, sequence):
    """Each serves four query heads or more; its gradient is the sum over those devices."""
    v = values(0, x=(2, 8, 5), query=(5, 8 * 3), key=(5, heads * 3), weight=(8,))
    tp = TensorParallel("tp", sequence=sequence)
    key_spec = P(None, "tp") if heads >= n else P()
    specs = (P("dp", "tp") if sequence else P("dp"), P(None, "tp"), key_spec, P("tp"))

    def loss(tp, heads, x, query, key, weight):
        return jnp.sum(attend(tp, x, query, key, heads) * weight[None])

    def sharded(*args):
        summed = lambda *args: jax.lax.psum(loss(tp, heads, *args), ("dp", "tp"))
        return jax.grad(summed, argnums=(0, 1, 2, 3))(*args)

    found = run_on(mesh_of(dp=2, tp=n), sharded, specs, specs, tuple(v.values()))
    dense = jax.grad(lambda *args: loss(ONE, heads, *args), argnums=(0, 1, 2, 3))
    assert_equal(found, on_one(dense, *v.values()))


def test_a_token_that_is_nowhere_embeds_to_zero_on_one_device_and_on_many():
    table, tokens = values(1, table=(8, 3))["table"], np.array([[0, 7, 8, -1, 3, 99]])
    expected = np.where((tokens >= 0) & (tokens < 8), 1, 0)[..., None] * table[tokens % 8]
    tp = TensorParallel("tp")
    found = run_on(mesh_of(tp=4), tp.embed, (P("tp"), P()), P(), (table, tokens))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(on_one(ONE.embed, table, tokens), expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"overlap": "ring"}, "`overlap` is 'ring', and it hides the gathers and scatters of"),
        (
            {"axis": None, "sequence": True},
            "`sequence` and `overlap` need an `axis`: name the",
        ),
        ({"sequence": True, "overlap": "rings"}, "is 'rings'; there is None, 'ring' and 'pallas'"),
    ],
)
def test_what_makes_no_sense_by_itself_is_refused(how, message, unchecked):
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorParallel(**{"axis": "tp", **how})


def refused(f, specs, message: str, *shapes):
    mesh = mesh_of(dp=2, tp=4)
    args = jax.device_put([np.ones(shape) for shape in shapes], shardings(mesh, list(specs)))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=P()), *args)


def test_a_stream_of_another_type_is_refused_by_name():
    plain, sequence = TensorParallel("tp"), TensorParallel("tp", sequence=True)
    x, w = (2, 8, 4), (4, 8)
    refused(
        lambda x, w: plain.column(x, w), [P("dp", "tp"), P(None, "tp")],
        r"`TensorParallel.enter`: the stream \(1, 2, 4\) varies over 'tp', and without "
        r"`sequence=True` it must be the same on all of its devices: a block before it", x, w,
    )  # fmt: skip
    refused(
        lambda x, w: sequence.column(x, w), [P("dp"), P(None, "tp")],
        r"`TensorParallel.enter`: \(1, 8, 4\) is the same on all devices of 'tp', .* split the "
        r"weights of the block over 'tp' in `in_specs`, and the stream along its positions", x, w,
    )  # fmt: skip
    refused(
        lambda x, w: plain.row(x, w), [P("dp"), P()],
        r"`TensorParallel.leave`: \(1, 8, 8\) is the same on all devices of 'tp'", x, w,
    )  # fmt: skip
    refused(
        lambda x, w: sequence.row(data.per_device(x, "tp"), w), [P("dp"), P(None, "tp")],
        r"6 positions \(dimension 1 of \(1, 6, 2\)\) are no multiple of tp=4", (2, 6, 4), w,
    )  # fmt: skip
    refused(
        lambda x, w: plain.head_columns(w, 3), [P(), P()],
        r"`head_columns`: 3 heads, 8 columns and tp=4; needed are heads that divide", x, w,
    )  # fmt: skip


def test_a_sum_that_is_left_out_is_a_type_error():
    """A partial sum can't leave as if it were the whole."""
    refused(lambda x, w: x @ w, [P(None, None, "tp"), P("tp")], r"out_specs", (2, 8, 4), (4, 8))


def test_a_cast_over_too_many_axes_is_a_type_error():
    """What varies over `tp` can't be added to a stream that does not, in a loop over layers."""
    plain = TensorParallel("tp")

    def f(x, w, scale):
        scale = data.per_device(scale, ("dp", "tp"))
        step = lambda x, _: (plain.row(plain.column(x * scale, w)[0], w.T), None)
        return jax.lax.scan(step, x, None, length=2)[0]

    refused(
        f, [P("dp"), P(None, "tp"), P()], r"varies over 'tp', and without `sequence=True`",
        (2, 8, 4), (4, 8), (1, 1, 4),
    )  # fmt: skip
