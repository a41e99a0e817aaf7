"""Models cut into stages: where, and that the stages are the model, in both executors."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tests.oracle import once
from xform import causal, flex_attention, stages
from xform._stages._program import best_cuts
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
    # Cut for a whole microbatch; a device has half of one.
    cut = stages(loss, count, link=0)(params, one(batch))
    assert cut.tied == ["['codes']", "['places']"]
    check(cut, loss, params, batch, build(name, ranks, microbatches), executor)


# ---- layers written one by one -------------------------------------------------------------------


def unrolled(marks: bool, integers: bool = False):
    """Layers of different widths, a skip over several of them, a table that two of them share."""
    rng = np.random.default_rng(1)
    params = {
        "in": normal(rng, 3, 5), "one": normal(rng, 5, 8), "two": normal(rng, 8, 5),
        "both": normal(rng, 5, 5), "out": normal(rng, 5),
    }  # fmt: skip
    mark = lambda x: checkpoint_name(x, "stage") if marks else x

    def loss(params, batch):
        x = mark(jnp.tanh(batch @ params["in"]))
        skip = x
        x = jnp.tanh(x @ params["both"]) @ params["one"]
        x = mark(x)
        x = jax.checkpoint(lambda x: jnp.tanh(x @ params["two"]))(x) + skip
        if integers:
            best = jnp.argmax(x, -1)
            x = mark(x * best[:, None])
        x = mark(x @ params["both"])
        return jnp.sum(jnp.sin(x) @ params["out"])

    return loss, params


@pytest.mark.parametrize(
    ("at", "executor"),
    [("marks", "per_stage"), pytest.param("count", "one_program", marks=pytest.mark.slow)],
)
def test_any_model_at_marks_or_balanced(at, executor):
    loss, params = unrolled(marks=at == "marks")
    batch = np.random.default_rng(0).normal(size=(3, 4, 3))
    by = stages(loss, at="stage") if at == "marks" else stages(loss, 4, link=0)
    cut = by(params, batch[0, :2])
    assert len(cut.stage) == 4
    assert "['both']" in cut.tied
    if at == "marks":
        # Behind the second mark both x and what skips over it have to be sent.
        assert [row.sent for row in cut.rows] == [2 * 5 * 8, 2 * (8 + 5) * 8, 2 * 5 * 8, 0]
    schedule = build("zb-h1", 4, 3)
    check(cut, loss, params, batch, schedule, executor, specs=P(None, "dp"))


def test_alike_stages_are_one_function_and_slots_are_shared():
    loss, params = transformer(8)
    cut = stages(loss, 4, link=0.0)(params, one(batches(1)))
    lengths = [str(row.first + row.last).count("layer") for row in cut.rows]
    assert lengths == [1, 2, 2, 1]
    assert len({*cut.stage}) < 4
    shapes = [w.shape for w in cut.split(params)]
    assert shapes.count((4, 7, 4)) == 1  # both ends hold the table in one slot
    back = cut.join(cut.split(params))
    np.testing.assert_allclose(back["codes"], 2 * params["codes"])
    np.testing.assert_allclose(back["places"], 4 * params["places"])
    np.testing.assert_allclose(back["layers"]["a"], params["layers"]["a"])
    assert "used by several: ['codes'], ['places']" in str(cut)
    assert "(layer 1)" in str(cut)


def test_cuts_are_the_best_of_all():
    """Against all cuts of small rows: the least slowest stage, then the fewest bytes."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, count, link = int(rng.integers(2, 9)), int(rng.integers(1, 5)), int(rng.integers(0, 3))
        costs = np.concatenate([[0.0], np.cumsum(rng.integers(0, 6, n))])
        sent = np.array([0.0, *rng.integers(0, 6, n - 1), 0.0])
        sent[1:-1][rng.random(n - 1) < 0.2] = np.inf
        choices = {}
        for cuts in combinations(range(1, n), count - 1):
            ends = [*cuts, n]
            parts = np.diff(costs[[0, *ends]]) + (link * sent[ends] if link else 0)
            if np.isfinite(sent[ends]).all():
                choices[cuts] = max(parts), sum(sent[ends])
        if choices:
            found = tuple(best_cuts(costs, sent, count, float(link)))
            assert choices[found] == min(choices.values()), (costs, sent, found)


def test_the_price_of_a_byte_moves_cuts_to_where_little_is_sent():
    """A narrow place in the middle of the second half."""
    rng = np.random.default_rng(0)
    sizes = [8, 8, 8, 8, 8, 1, 8]
    params = [normal(rng, a, b) for a, b in pairwise(sizes)]

    def loss(params, x):
        for w in params:
            x = x @ w
        return jnp.sum(x)

    x = np.ones((2, 8))
    assert [row.sent for row in stages(loss, 2, link=0.0)(params, x).rows] == [128, 0]
    assert [row.sent for row in stages(loss, 2, link=1e6)(params, x).rows] == [16, 0]


def test_mistakes_are_named():
    loss, params = unrolled(marks=True, integers=True)
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"a number of stages or `at=`, .* not both"):
        stages(loss)
    with pytest.raises(ValueError, match=r"`stages\(f, 99\)`: this model can be cut at \d+ places"):
        stages(loss, 99)(params, x)
    with pytest.raises(ValueError, match="found no `checkpoint_name"):
        stages(loss, at="other")(params, x)
    in_loop, layers = transformer(2)
    with pytest.raises(ValueError, match="Inside of a loop a mark is of every turn"):
        stages(in_loop, at="stage")(layers, one(batches(1)))
    with pytest.raises(ValueError, match=r"one number; found float64\[2,3\]"):
        stages(lambda p, x: x * p, 2)(1.0, x)
    with pytest.raises(ValueError, match="depends on both parameters and batch"):
        stages(lambda p, x: jnp.sum(x), 1)(1.0, x)
    wrong = lambda p, x: jnp.sum(checkpoint_name(jnp.argmax(x @ p, -1), "stage") * 1.0)
    with pytest.raises(ValueError, match=r"can't cut at .*test_stages.*no float would have to be"):
        stages(wrong, at="stage")(params["in"], x)
    cut = stages(loss, 3)(params, x)
    mesh = make_mesh(pp=2, devices=jax.devices()[:2])
    run = one_program(cut.stage, cut.first, cut.last, mesh=mesh)
    put = lambda tree, *spec: jax.device_put(tree, shardings(mesh, P(*spec)))
    weights = put([w[:2] for w in cut.split(params)], "pp")
    with pytest.raises(ValueError, match=r"list of 3 functions, and the schedule has 2 stages"):
        run(build("1f1b", 2, 2), weights, [], put(np.ones((2, 2, 3))))
