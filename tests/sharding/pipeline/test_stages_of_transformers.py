"""Stages as they are in use: attention by one primitive, scanned layers, remat, split experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.sharding.pipeline.models import mesh_of
from xform import causal, documents, flex_attention
from xform.sharding import settle, shardings
from xform.sharding.pipeline import by_rank, by_stage, one_program, per_stage, zb_h1

LAYERS, WIDTH, HEADS, SIZE, LENGTH, ROWS, CODES = 2, 8, 2, 4, 6, 2, 9


def block(w, x, batch, total):
    """A layer; `total` sums what the devices of `tp` have parts of."""
    ids = batch["documents"]
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[name]) for name in "qkv")
    alibi = lambda score, b, h, i, j: score - w["slope"][h] * (i - j)
    out = flex_attention(q, k, v, mask_mod=causal() & documents(ids), score_mod=alibi)
    x = x + total(jnp.einsum("bthe,hed->btd", out, w["o"]))
    gates = jax.nn.softmax(x @ w["router"])
    up = jnp.einsum("btd,edh->bteh", x, w["up"])
    down = jnp.einsum("bteh,ehd->bted", jax.nn.silu(up), w["down"])
    return x + total(jnp.einsum("bted,bte->btd", down, gates))


def stage_of(total, remat: bool):
    def stage(w, x, batch):
        layer = lambda x, w: (block(w, x, batch, total), None)
        return lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0]

    return stage


def first(shared, batch):
    return shared["codes"][batch["ids"]]


def last(shared, y, batch):
    scores = jax.nn.log_softmax(y @ shared["codes"].T)
    return -jnp.sum(jnp.take_along_axis(scores, batch["ids"][..., None], 2)) / 100


def operands(stages: int, microbatches: int):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=(stages, LAYERS, *shape)) * 0.3
    weights = {
        **{name: normal(WIDTH, HEADS, SIZE) for name in "qkv"},
        "slope": normal(HEADS),
        "o": normal(HEADS, SIZE, WIDTH),
        "router": normal(WIDTH, 2),
        "up": normal(2, WIDTH, 6),
        "down": normal(2, 6, WIDTH),
    }
    ids = rng.integers(0, CODES, (microbatches, ROWS, LENGTH))
    texts = np.sort(rng.integers(0, 2, (microbatches, ROWS, LENGTH)))
    return weights, {"codes": rng.normal(size=(CODES, WIDTH))}, {"ids": ids, "documents": texts}


SPLIT = {"q": 3, "k": 3, "v": 3, "slope": 2, "o": 2, "up": 4, "down": 3}
SPECS = {
    name: P("pp", *[None] * (SPLIT[name] - 1), "tp") if name in SPLIT else P("pp")
    for name in ("q", "k", "v", "slope", "o", "router", "up", "down")
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "remat"), [(one_program, False), (one_program, True), (per_stage, True)],
    ids=["one_program", "one_program_remat", "per_stage_remat"],
)  # fmt: skip
def test_attention_experts_and_remat_under_zero_bubble(executor, remat):
    with jax.enable_x64(True):
        schedule, given = zb_h1(2, 3), operands(2, 3)

        def loss(weights, shared):
            total = 0.0
            for m in range(3):
                batch = jax.tree.map(lambda b, m=m: b[m], given[2])
                x = first(shared, batch)
                for s in range(2):
                    w = jax.tree.map(lambda w, s=s: w[s], weights)
                    x = stage_of(lambda y: y, False)(w, x, batch)
                total = total + last(shared, x, batch)
            return total

        true = jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(*given[:2]))
        mesh = mesh_of(2, 2)
        put = lambda tree, specs: jax.device_put(tree, shardings(mesh, specs))
        spread = lambda tree: jax.tree.map(lambda x: put(x, P()), tree)
        args = put(by_rank(given[0], schedule), SPECS), spread(given[1]), spread(given[2])
        stage = stage_of(lambda y: lax.psum(y, "tp"), remat)
        run = executor(stage, first, last, mesh=mesh, weights=SPECS)
        value, (dw, ds) = jax.device_get(settle(run(schedule, *args)))
        found = value, (by_stage(dw, schedule), ds)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(true), strict=True
        ):
            name = jax.tree_util.keystr(path)
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)
