"""Models cut into stages: where, and that the stages are the model, in both executors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.oracle import once
from xform import causal, flex_attention, stages
from xform.sharding import make_mesh, settle, shardings
from xform.sharding.pipeline import build, by_rank, by_stage, one_program, per_stage

WIDTH, CODES, ROWS, LENGTH = 4, 7, 4, 6
EXECUTORS = {"one_program": one_program, "per_stage": per_stage}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def normal(rng, *shape: int):
    return rng.normal(size=shape) * 0.4


def transformer(layers: int):
    """Tied embeddings, scanned layers, a position table that all layers read."""
    rng = np.random.default_rng(layers)
    params = {
        "codes": normal(rng, CODES, WIDTH),
        "layers": {
            "qkv": normal(rng, layers, 3, WIDTH, 2, 2),
            "out": normal(rng, layers, 2, 2, WIDTH),
            "a": normal(rng, layers, WIDTH, 5),
            "b": normal(rng, layers, 5, WIDTH),
        },
        "norm": 1 + normal(rng, WIDTH),
        "places": normal(rng, LENGTH, WIDTH),
    }

    def layer(x, w, places):
        q, k, v = jnp.einsum("btd,ndhe->nbthe", x + jnp.tanh(places)[None], w["qkv"])
        x = x + jnp.einsum("bthe,hed->btd", flex_attention(q, k, v, mask_mod=causal()), w["out"])
        return x + jnp.tanh(x @ w["a"]) @ w["b"], None

    def loss(params, batch):
        x = params["codes"][batch["ids"]]
        x = lax.scan(lambda x, w: layer(x, w, params["places"]), x, params["layers"])[0]
        x = x * params["norm"][None, None] * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1)
        scores = jax.nn.log_softmax(x @ params["codes"].T)
        own = jnp.take_along_axis(scores, batch["ids"][..., None], 2)[..., 0]
        return -jnp.sum(own * batch["mask"]) / batch["count"]

    return loss, params


def batches(microbatches: int):
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, CODES, (microbatches, ROWS, LENGTH)),
        "mask": rng.normal(size=(microbatches, ROWS, LENGTH)),
        "count": np.full(microbatches, 5.0),
    }


BATCH = {"ids": P(None, "dp"), "mask": P(None, "dp"), "count": P()}


def check(cut, loss, params, batch, schedule, executor, specs=BATCH, dp=2):
    """That loss and every gradient in a pipeline are those of one device."""

    def whole(params):
        of = lambda m: loss(params, jax.tree.map(lambda b: b[m], batch))
        return sum(of(m) for m in range(schedule.microbatches))

    true = jax.device_get(once(jax.value_and_grad(whole), params))
    devices = jax.devices("cpu")[: schedule.ranks * dp]
    mesh = make_mesh(dp=dp, pp=schedule.ranks, devices=devices)
    weights = jax.device_get(by_rank(cut.split(params), schedule))
    batch = jax.device_put(batch, shardings(mesh, specs))
    weights = jax.device_put(weights, shardings(mesh, P("pp")))
    run = EXECUTORS[executor](cut.stage, cut.first, cut.last, mesh=mesh, batch=specs)
    value, (dw, _) = jax.device_get(settle(run(schedule, weights, [], batch)))
    found = value, jax.device_get(cut.join(by_stage(dw, schedule)))
    assert jax.tree.structure(found) == jax.tree.structure(true)
    paths = jax.tree.leaves_with_path(found)
    for (path, a), b in zip(paths, jax.tree.leaves(true), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.abs(b).max() > 1e-6, name
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max(), err_msg=name)


def one(batch):
    return jax.tree.map(lambda b: b[0], batch)


@pytest.mark.parametrize(
    ("layers", "count", "name", "ranks", "microbatches", "executor"),
    [
        (7, 4, "zb-h1", 4, 3, "one_program"),
        pytest.param(7, 4, "1f1b", 4, 2, "per_stage", marks=pytest.mark.slow),
        pytest.param(5, 4, "zb-v", 2, 3, "one_program", marks=pytest.mark.slow),
        pytest.param(3, 2, "zb-h1", 2, 5, "per_stage", marks=pytest.mark.slow),
        pytest.param(4, 2, "gpipe", 2, 1, "one_program", marks=pytest.mark.slow),
    ],
)
def test_stages_are_the_model(layers, count, name, ranks, microbatches, executor):
    """Uneven layers, tied embeddings, fewer microbatches than stages."""
    loss, params = transformer(layers)
    batch = batches(microbatches)
    cut = stages(loss, count, link=0)(params, rows_of(one(batch)))
    assert cut.tied == ["['codes']", "['places']"]
    check(cut, loss, params, batch, build(name, ranks, microbatches), executor)


def rows_of(batch):
    """What a device of two sees of a microbatch."""
    return {"ids": batch["ids"][:2], "mask": batch["mask"][:2], "count": batch["count"]}
