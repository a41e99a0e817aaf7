"""Losses and norms that don't depend on who has which tokens and entries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform import linear_cross_entropy
from xform.sharding import TensorParallel, data, loss, norm, shardings

TOKENS, WIDTH = (4, 16), 6


def arrays(entries: int, kept: float):
    rng = np.random.default_rng(3)
    v = values(2, x=(*TOKENS, WIDTH), w=(WIDTH, entries))
    labels = rng.integers(entries, size=TOKENS)
    return v["x"], v["w"], np.where(rng.random(TOKENS) < kept, labels, -1)


def summed(x, w, labels, f=linear_cross_entropy):
    each, lse = f(x, w, labels)
    return jnp.sum(each * jnp.cos(each)) + jnp.sum(jnp.sin(lse))


@pytest.mark.parametrize(
    ("entries", "sequence"),
    [(1003, False), pytest.param(1003, True, marks=pytest.mark.slow), (9, True)],
)
def test_a_vocabulary_that_does_not_divide_is_padded(entries, sequence):
    """Of 9 entries in 16, three devices have padding alone. Padding has no gradient."""
    tp = TensorParallel("tp", sequence=sequence)
    x, w, labels = arrays(entries, kept=0.7)
    padded = np.pad(w, [(0, 0), (0, -entries % 8)], constant_values=7.0)
    if entries == 9:
        padded = np.pad(padded, [(0, 0), (0, 16 - padded.shape[1])], constant_values=7.0)
    split = lambda x, w, y: loss.cross_entropy(x, w, y, tp, entries=entries)

    def sharded(x, w, labels):
        f = lambda x, w: summed(x, w, labels, split)
        return jax.value_and_grad(f, argnums=(0, 1))(x, w)

    x_spec, w_spec = (P(None, "tp") if sequence else P()), P(None, "tp")
    out = (P(), (x_spec, w_spec))
    value, (dx, dw) = run_on(
        mesh_of(tp=8), sharded, (x_spec, w_spec, P()), out, (x, padded, labels)
    )
    assert (dw[:, entries:] == 0).all()
    expected = on_one(jax.value_and_grad(summed, argnums=(0, 1)), x, w, labels)
    assert_equal((value, (dx, dw[:, :entries])), expected)


def test_a_label_in_the_padding_is_the_mistake_that_it_is_without():
    tp = TensorParallel("tp")
    x, w, labels = arrays(16, kept=1.0)
    labels[0, :2] = [15, 13]
    f = lambda x, w, y: loss.cross_entropy(x, w, y, tp, entries=15)[0]
    each = run_on(mesh_of(tp=8), f, (P(), P(None, "tp"), P()), P(), (x, w, labels))
    assert np.isnan(each[0, 0])
    assert np.isfinite(each[0, 1])


def test_padding_that_would_count_is_refused():
    """A cap brings minus infinity back, and smoothing means over all entries."""
    tp = TensorParallel("tp")
    x, w, labels = arrays(16, kept=1.0)
    on = lambda **how: run_on(
        mesh_of(tp=8), lambda x, w, y: loss.cross_entropy(x, w, y, tp, **how)[0],
        (P(), P(None, "tp"), P()), P(), (x, w, labels),
    )  # fmt: skip
    with pytest.raises(
        NotImplementedError, match=r"softcap and label_smoothing would count the 1 entries that"
    ):
        on(entries=15, softcap=5.0, label_smoothing=0.1)
    for entries in (0, 17):
        with pytest.raises(ValueError, match=rf"entries={entries}, and the matrix has 16 on all"):
            on(entries=entries)
    capped = lambda x, w, y: linear_cross_entropy(x, w, y, softcap=5.0, label_smoothing=0.1)[0]
    assert_equal(on(entries=16, softcap=5.0, label_smoothing=0.1), on_one(capped, x, w, labels))


def test_logits_are_never_whole():
    """No operation of the compiled program, forward and backward, makes an array of their size."""
    tp = TensorParallel("tp", sequence=True)
    x, w, labels = arrays(4096, kept=1.0)
    mesh = mesh_of(dp=2, tp=4)
    specs = (P("dp", "tp"), P(None, "tp"), P("dp"))

    def grads(x, w, labels):
        f = lambda x, w: jax.lax.psum(loss.cross_entropy(x, w, labels, tp)[0].sum(), "dp")
        return jax.grad(f, argnums=(0, 1))(x, w)

    f = jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    narrow = (x.astype(np.float32), w.astype(np.float32), labels.astype(np.int32))
    args = jax.device_put(narrow, shardings(mesh, specs))
    text = jax.jit(f).lower(*args).compile().as_text() or ""
    sizes = [set(dims.split(",")) for dims in re.findall(r"[a-z]\d+\[([\d,]+)\]", text)]
    assert any("1024" in dims for dims in sizes)
    assert not any("4096" in dims for dims in sizes)


@pytest.mark.parametrize("kept", [0.0, 0.1, 1.0])
def test_the_mean_is_over_all_labels_of_all_devices(kept):
    """A device may have none; without any, loss and gradients are 0 and not NaN."""
    _, w, labels = arrays(8, kept)
    labels[:2] = -1  # the rows of the first device
    x = values(4, x=(*TOKENS, WIDTH))["x"]

    def total(w, rows):
        x, labels = rows
        return jnp.sum(linear_cross_entropy(x, w, labels)[0]), jnp.sum(labels >= 0)

    enter = lambda w: data.per_device(w, "dp")
    f = data.value_and_grad(total, enter, "dp", microbatches=2)
    found = run_on(mesh_of(dp=2), f, (P(), P("dp")), (P(), P()), (w, (x, labels)))
    if not kept:
        assert found[0] == 0
        assert (found[1] == 0).all()
        return
    mean = lambda w, rows: (lambda t: t[0] / t[1])(total(w, rows))
    assert_equal(found, on_one(jax.value_and_grad(mean), w, (x, labels)))


def test_a_gradient_that_was_not_summed_has_no_norm():
    grads = {"a": np.ones((4, 2)), "b": {"c": np.ones(8)}}
    specs = {"a": P("tp"), "b": {"c": P()}}
    f = lambda grads: norm.global_norm(data.per_device(grads, "dp"), specs)
    with pytest.raises(
        ValueError,
        match=r"`global_norm`: \['a'\] varies over \['dp'\] and is split by .*'tp'.*; "
        r"\['b'\]\['c'\] varies over \['dp'\] .*Sum these gradients over the devices first",
    ):
        run_on(mesh_of(dp=2, tp=2), f, (specs,), P(), (grads,))
