"""What runs once, before all passes and after them; and axes of a stage's own beside `pp`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.sharding.pipeline.models import (
    BATCH,
    assert_parity,
    first,
    inputs,
    last_dp,
    mesh_of,
    one_device,
    stage_tp,
)
from xform.sharding import data, make_mesh, settle, shardings
from xform.sharding.pipeline import build, by_rank, one_program, per_stage

EXECUTORS = {"one_program": one_program, "per_stage": per_stage}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


# ---- weights that rest split over `dp` -----------------------------------------------------------

SPLIT = {"a": P("pp", "dp", "tp"), "b": P("pp", "tp", "dp"), "scale": P("pp", "dp")}
SHARED = {"codes": P(None, "dp"), "bias": P()}


def enter(weights, shared):
    return data.gather(weights, SPLIT, "dp"), data.gather(shared, SHARED, "dp")


def split_program(executor, mesh):
    specs = dict(weights=SPLIT, shared=SHARED, batch=BATCH, enter=enter)
    return EXECUTORS[executor](stage_tp, first, last_dp, mesh=mesh, **specs)


def on_mesh(mesh, schedule, given):
    weights, shared, batch = given
    trees = by_rank(weights, schedule), shared, batch
    return jax.device_put(trees, shardings(mesh, (SPLIT, SHARED, BATCH)))


@pytest.mark.parametrize(
    ("executor", "name"),
    [pytest.param("one_program", "zb-v", marks=pytest.mark.slow), ("per_stage", "zb-h1")],
    ids=str,
)
def test_split_weights_are_gathered_once_and_so_are_their_gradients(executor, name):
    schedule, mesh = build(name, 2, 3), mesh_of(2, 2, 2)
    given = inputs(schedule.stages, 3)
    run, args = split_program(executor, mesh), on_mesh(mesh, schedule, given)
    found = settle(run(schedule, *args))
    assert_parity(found, one_device(*given), schedule)
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, found[1], args[:2])))
    if executor == "one_program":
        text = run.lower(schedule, *args).as_text()
        loop = text[text.index("stablehlo.while") :]
        assert len(re.findall("stablehlo.all_gather", text)) == 4
        assert len(re.findall("stablehlo.reduce_scatter", text)) == 4
        assert "all_gather" not in loop


# ---- `cp`: positions are split, and a stage reaches over its rank's own group --------------------


def keys_and_values(y, how):
    """What each position of a row sums over, by rings or gathered."""
    if how == "gather":
        whole = lax.all_gather(y, "cp", axis=1, tiled=True)
        return jnp.tanh(whole).sum(1, keepdims=True)
    total = jnp.zeros_like(y[:, :1])
    for _ in range(lax.axis_size("cp")):
        total = total + jnp.tanh(y).sum(1, keepdims=True)
        y = lax.ppermute(y, "cp", [(i, (i + 1) % 4) for i in range(4)])
    return total


def cp_model(how):
    def stage(w, x, batch):
        del batch
        return x + jnp.tanh(x @ w["a"]) * keys_and_values(x @ w["b"], how)

    def last(shared, y, batch):
        # Neighbours' last positions, and none before the first.
        before = lax.ppermute(y[:, -1:], "cp", [(i, i + 1) for i in range(3)])
        return lax.psum(jnp.sum(jnp.sin(y) * before * shared), "cp")

    return stage, lambda s, b: b * s, last


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("how", ["ring", pytest.param("gather", marks=pytest.mark.slow)])
def test_context_parallel_stages(executor, how):
    """XLA has all devices of a program meet in a permute; those in other branches must not."""
    rng, mesh = np.random.default_rng(0), make_mesh(pp=2, cp=4, devices=jax.devices()[:8])
    weights = {name: rng.normal(size=(2, 3, 3)) * 0.5 for name in "ab"}
    batch, schedule = rng.normal(size=(3, 2, 8, 3)), build("zb-h1", 2, 3)

    def loss(weights, shared):
        total = 0.0
        for x in batch:
            x = x * shared
            for s in range(2):
                y = jnp.tanh(x @ weights["b"][s]).sum(1, keepdims=True)
                x = x + jnp.tanh(x @ weights["a"][s]) * y
            parts = x.reshape(2, 4, 2, 3)
            before = jnp.pad(parts[:, :-1, -1:], ((0, 0), (1, 0), (0, 0), (0, 0)))
            total = total + jnp.sum(jnp.sin(parts) * before) * shared
        return total

    true, (dw, ds) = jax.value_and_grad(loss, (0, 1))(weights, 1.3)
    put = lambda x, *spec: jax.device_put(x, shardings(mesh, P(*spec)))
    run = EXECUTORS[executor](*cp_model(how), mesh=mesh, batch=P(None, None, "cp"))
    args = jax.tree.map(lambda w: put(w, "pp"), weights), put(1.3), put(batch, None, None, "cp")
    found = jax.device_get(settle(run(schedule, *args)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((true, (dw, ds))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12 * np.abs(b).max())


@pytest.mark.slow
def test_a_permute_in_groups_is_a_permute():
    """Of any pairs, on one axis of two and on both, what is no float too."""
    from xform.sharding.pipeline._permute import in_groups

    mesh = make_mesh(dp=2, cp=4, devices=jax.devices()[:8])
    values = np.arange(16.0).reshape(8, 2)
    cases = (("cp", [(0, 2), (3, 1)]), ("cp", []), (("dp", "cp"), [(0, 7), (7, 3)]))
    for (axes, pairs), x in zip(cases, (values, values > 5, values.astype(np.int8)), strict=True):
        f = lambda x, axes=axes, pairs=pairs: lax.ppermute(x, axes, pairs)
        spec = P(("dp", "cp"))
        over = lambda f, spec=spec: jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
        placed = jax.device_put(x, shardings(mesh, spec))
        found, true = over(in_groups(f, "pp"))(placed), over(f)(placed)
        assert found.dtype == true.dtype
        np.testing.assert_array_equal(found, true)
