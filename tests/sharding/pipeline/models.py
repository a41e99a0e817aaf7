"""A small model with tied ends, for one device and for a mesh, and their comparison."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from xform.sharding import make_mesh, settle, shardings
from xform.sharding.pipeline import BUILDERS, Schedule, by_rank, by_stage, one_program

WIDTH, HIDDEN, CODES, ROWS = 4, 6, 7, 4
SPECS = {"a": P("pp", None, "tp"), "b": P("pp", "tp"), "scale": P("pp")}


def pairwise() -> list[tuple[str, int, int, int]]:
    """Builders, ranks, microbatches and `tp`, so that every two values of them meet."""
    cases = []
    for i, name in enumerate(BUILDERS):
        for j, ranks in enumerate((1, 2, 4, 8)):
            fewer_same_other = (max(1, ranks - 1), ranks, 2 * ranks + 1)
            tp = 1 if ranks == 8 else 1 + (i + j // 2 + (i + j) // 3) % 2
            cases.append((name, ranks, fewer_same_other[(i + j) % 3], tp))
    return cases


def stage(w, x, batch):
    """A layer on one device."""
    return x + batch["mask"][:, None] * jnp.tanh((x * w["scale"][None]) @ w["a"]) @ w["b"]


def stage_tp(w, x, batch):
    """The same with its hidden part split over `tp`."""
    h = jnp.tanh((x * w["scale"][None]) @ w["a"]) @ w["b"]
    return x + batch["mask"][:, None] * lax.psum(h, "tp")


def first(shared, batch):
    """An embedding."""
    return shared["codes"][batch["ids"]]


def last(shared, y, batch):
    """Cross entropy with the embedding's weights once more; ids below 2 do not count."""
    scores = jax.nn.log_softmax(y @ shared["codes"].T + shared["bias"][None])
    own = jnp.take_along_axis(scores, batch["ids"][:, None], 1)[:, 0]
    return -jnp.sum(jnp.where(batch["ids"] < 2, 0, own)) / batch["count"]


def last_dp(shared, y, batch):
    """The same of a batch that is split over `dp`."""
    return lax.psum(last(shared, y, batch), "dp")


def inputs(stages: int, microbatches: int, seed: int = 0):
    """Random weights of so many stages, shared weights and a batch, as numpy arrays."""
    rng = np.random.default_rng([seed, stages, microbatches])
    normal = lambda *shape: rng.normal(size=shape) * 0.4
    weights = {
        "a": normal(stages, WIDTH, HIDDEN),
        "b": normal(stages, HIDDEN, WIDTH),
        "scale": 1 + normal(stages, WIDTH),
    }
    ids = rng.integers(0, CODES, (microbatches, ROWS))
    batch = {
        "ids": ids,
        "mask": normal(microbatches, ROWS),
        "count": np.full(microbatches, np.sum(ids >= 2), float),
    }
    return weights, {"codes": normal(CODES, WIDTH), "bias": normal(CODES)}, batch


def one_device(weights, shared, batch, stage: Callable = stage):
    """Loss and gradients without a pipeline."""

    def loss(weights, shared):
        total = 0.0
        for m in range(len(batch["ids"])):
            given = jax.tree.map(lambda b, m=m: b[m], batch)
            x = first(shared, given)
            for s in range(jax.tree.leaves(weights)[0].shape[0]):
                x = stage(jax.tree.map(lambda w, s=s: w[s], weights), x, given)
            total = total + last(shared, x, given)
        return total

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, shared)


def mesh_of(ranks: int, tp: int = 1, dp: int = 1):
    return make_mesh(dp=dp, pp=ranks, tp=tp, devices=jax.devices("cpu")[: ranks * tp * dp])


def placed(mesh, schedule: Schedule, weights, shared, batch):
    """The arrays where `program` wants them."""
    put = lambda tree, spec: jax.device_put(tree, shardings(mesh, spec))
    everywhere = lambda tree, spec: jax.tree.map(lambda x: put(x, spec), tree)
    return (
        put(by_rank(weights, schedule), SPECS),
        everywhere(shared, P()),
        {key: put(x, BATCH[key]) for key, x in batch.items()},
    )


BATCH = {"ids": P(None, "dp"), "mask": P(None, "dp"), "count": P()}


def program(mesh, **options):
    """The model as one program."""
    return one_program(stage_tp, first, last_dp, mesh=mesh, weights=SPECS, batch=BATCH, **options)


def assert_parity(found, wanted, schedule: Schedule, tolerance: float = 1e-12) -> None:
    """Loss and every leaf of the gradients."""
    (loss, (weights, shared)), (true, true_grads) = jax.device_get((settle(found), wanted))
    assert abs(loss - true) <= tolerance * abs(true)
    grads = by_stage(weights, schedule), shared
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(true_grads), strict=True
    ):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
        )
