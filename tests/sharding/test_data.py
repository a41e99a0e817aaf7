"""Gradients that are summed once, or not at all where that is asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform.jaxpr import trace, walk
from xform.sharding import data, fsdp, shardings

L, M = 3, 4


def layers(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def total(params, x):
    y = layers(x @ params["in"], params["stack"]) * params["scale"][None]
    return jnp.sum(jnp.cos(y)), jnp.sum(x[:, 0] > 0)


def arrays():
    v = values(0, x=(16, 6), stack=(L, M, M), scale=(M,))
    return {"in": values(1, w=(6, M))["w"], "stack": v["stack"], "scale": v["scale"]}, v["x"]


SPECS = {"in": P(None, "dp"), "stack": P(None, "dp"), "scale": P()}


def enter(params):
    """Some gathered, some cast: all before the loops over layers and microbatches."""
    return data.gather(params, SPECS, "dp")


def test_gradients_of_one_device_are_given_where_they_are_asked_for():
    """Each from its own rows; through the same cast, their sum."""
    params, x = arrays()

    def own(params, x):
        each = jax.grad(lambda p: total(p, x)[0])(data.per_device(params, "dp"))
        summed = jax.grad(lambda p: total(data.per_device(p, "dp"), x)[0])(params)
        return jax.tree.map(lambda g: g[None], each), summed

    each, summed = run_on(mesh_of(dp=4), own, (P(), P("dp")), (P("dp"), P()), (params, x))
    for i, rows in enumerate(np.split(x, 4)):
        alone = on_one(jax.grad(lambda p, x=rows: total(p, x)[0]), params)
        assert_equal(jax.tree.map(lambda g, i=i: g[i], each), alone)
    assert_equal(summed, on_one(jax.grad(lambda p: total(p, x)[0]), params))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_each_leaf_is_summed_once_outside_of_all_loops(microbatches):
    mesh = mesh_of(dp=4)
    f = data.value_and_grad(total, enter, "dp", microbatches=microbatches)
    f = jax.shard_map(f, mesh=mesh, in_specs=(SPECS, P("dp")), out_specs=(P(), SPECS))
    params, x = jax.tree.map(lambda a: a.astype(np.float32), arrays())
    args = jax.device_put((params, x), shardings(mesh, (SPECS, P("dp"))))
    talk = ("psum", "reduce_scatter", "all_gather", "all_to_all", "ppermute")
    sites = [s for s in walk(trace(f, *args)) if s.eqn.primitive.name.startswith(talk)]
    assert not [s for s in sites if {name for name, _ in s.path} & {"scan", "while"}]
    names = [s.eqn.primitive.name for s in sites]
    count = lambda part: sum(part in name for name in names)
    # Two leaves are split and one is whole; then the sum of losses and that of labels.
    assert (count("all_gather"), count("reduce_scatter"), count("psum")) == (2, 2, 3)
    hlo = jax.jit(f).lower(*args).compile().as_text()
    assert hlo
    assert " all-to-all(" not in hlo


@pytest.mark.parametrize("microbatches", [1, 4])
def test_they_equal_those_of_one_device(microbatches):
    f = data.value_and_grad(total, enter, "dp", microbatches=microbatches)
    params, x = arrays()
    mean = lambda p, x: (lambda t: t[0] / t[1])(total(p, x))
    found = run_on(mesh_of(dp=4), f, (SPECS, P("dp")), (P(), SPECS), (params, x))
    assert_equal(found, on_one(jax.value_and_grad(mean), params, x))


def test_bfloat16_gradients_of_microbatches_are_added_up_in_float32():
    """256 additions of a number that bfloat16 would lose from the ninth on."""
    mesh = mesh_of(dp=1)
    loss = lambda w, x: (jnp.sum(w * x.astype(w.dtype)), jnp.sum(x > 0))
    f = data.value_and_grad(loss, lambda w: data.per_device(w, "dp"), "dp", microbatches=512)
    f = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))
    w, x = jnp.ones((), jnp.bfloat16), jnp.ones(512)
    _, grad = f(*jax.device_put((w, x), shardings(mesh, (P(), P("dp")))))
    assert grad.dtype == jnp.bfloat16
    assert grad == 1


def test_what_does_not_fit_is_named():
    params, x = arrays()
    f = data.value_and_grad(total, enter, "dp", microbatches=3)
    f = data.value_and_grad(total, enter, "dp", microbatches=3)
    with pytest.raises(ValueError, match=r"`microbatches` is 3, and a device has \[4\] rows"):
        run_on(mesh_of(dp=4), f, (SPECS, P("dp")), (P(), SPECS), (params, x))
    spec = {"a": {"b": P(("dp", "tp"))}}
    f = lambda p: data.gather(p, spec, "dp")
    with pytest.raises(ValueError, match=re.escape("`gather` over 'dp': ['a']['b'] is split over")):
        run_on(mesh_of(dp=2, tp=2), f, (spec,), P(), ({"a": {"b": np.ones(8)}},))
    shapes = {"odd": np.ones((3, 5)), "twice": np.ones(8), "good": np.ones((3, 8))}
    specs = {"odd": P(), "twice": P("dp"), "good": P()}
    with pytest.raises(
        ValueError, match=r"over dp=4 .*: \['odd'\] \(3, 5\) as .*; \['twice'\] \(8,\) as"
    ) as error:
        fsdp.split(specs, shapes, mesh_of(dp=4))
    assert "good" not in str(error.value)


def test_a_gradient_that_is_not_summed_can_not_leave_as_the_whole():
    params, x = arrays()
    f = lambda p, x: jax.grad(lambda p: total(p, x)[0])(data.per_device(p, "dp"))
    with pytest.raises(ValueError, match="out_specs"):
        run_on(mesh_of(dp=4), f, (P(), P("dp")), P(), (params, x))
