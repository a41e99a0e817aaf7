"""`remat` on the example model with 16 layers, beside JAX's checkpoint policies."""

import itertools
import math
import subprocess
import sys
from functools import partial, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import between
import llama
from xform import causal, cost, documents, linear_cross_entropy, remat
from xform._hlo import compile_for
from xform._remat._kinds import kind_of
from xform.jaxpr import walk
from xform.train import Rows
from xform.train.data import NO_LABEL

CONFIG = llama.Config(layers=16)
SHAPE = (4, 256)


@pytest.fixture(autouse=True)
def broadcasting():
    """As the model does it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def arguments():
    params = jax.eval_shape(partial(llama.init, CONFIG), jax.random.key(0))
    return params, jax.eval_shape(lambda: Rows(*[np.zeros(SHAPE, np.int32)] * 3))


def loss(params, rows):
    return llama.loss(params, rows, CONFIG)[0]


def checkpointed(params, rows, policy):
    """The same, each layer under a policy of JAX's."""
    mask = causal() & documents(rows.ids)
    rotation = llama.rotations(jnp.arange(SHAPE[1]), CONFIG)
    layer = lambda x, p: (llama.layer(x, p, mask, rotation, CONFIG)[0], None)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(layer, params["embed"][rows.tokens], params["layers"])
    x = between.rms_norm(x, params["norm"])
    each, _ = linear_cross_entropy(x, params["unembed"], rows.labels, ignore_label=NO_LABEL)
    return jnp.sum(each)


def temporaries(f, device="cpu", args=None) -> int:
    step, args = jax.value_and_grad(f), args or arguments()
    done = (
        jax.jit(step).lower(*args).compile()
        if device == "cpu"
        else compile_for(device, step, *args)
    )
    return done.memory_analysis().temp_size_in_bytes


def work(f) -> float:
    return float(cost(jax.value_and_grad(f))(*arguments()).flops)


@pytest.mark.slow
def test_with_the_bytes_of_saved_products_it_repeats_less():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    theirs = partial(checkpointed, policy=policy)
    budget = temporaries(theirs)
    ours = remat(loss, budget=budget)
    assert temporaries(ours) <= 1.05 * budget
    assert work(ours) <= work(theirs)
    again = remat.report(loss, budget=budget)(*arguments()).recomputed
    assert not {"reductions", "random", "collectives"} & {v.kind for v in again}


def unrolled():
    """The model with its layers one after another, and arguments of that form."""
    params, rows = arguments()
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), params["layers"])
    each = lambda step, x, layers: reduce(step, layers, x)
    f = lambda params, rows: llama.loss(params, rows, CONFIG, scan=each)[0]
    return f, ({**params, "layers": [one] * CONFIG.layers}, rows)


def runs(f, args, kind) -> int:
    """How often equations of a kind run in a step, kernels looked at from outside."""
    sites = walk(jax.make_jaxpr(jax.value_and_grad(f))(*args))
    times = lambda site: math.prod(e.params.get("length", 1) for e, _ in site.parents)
    return sum(times(site) for site in sites if kind_of(site.eqn) == kind)


FORMS = {"scanned": lambda: (loss, arguments()), "unrolled": unrolled}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_budget_repeats_reductions_random_bits_or_collectives(form):
    """By the report, and counted in the step that is made; products do run again."""
    f, args = FORMS[form]()
    for budget in ("none", 0.0):
        again = {v.kind for v in remat.report(f, budget=budget)(*args).recomputed}
        assert "products" in again
        assert again.isdisjoint(("reductions", "random", "collectives"))
        count = lambda budget, kind: runs(remat(f, budget=budget), args, kind)
        assert count(budget, "reductions") == count("all", "reductions") > 16
        assert count(budget, "random") == count("all", "random")
        assert count(budget, "products") > count("all", "products")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "device"), [("scanned", "cpu"), ("scanned", "H200"), ("unrolled", "cpu")]
)
def test_ten_budgets_hold_and_a_smaller_one_needs_less(form, device):
    """Unrolled and for an H200, which takes half an hour: `benchmarks/remat.py --budgets 10`."""
    if device != "cpu":
        pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for an H200")
    f, args = FORMS[form]()
    report = lambda b: remat.report(f, budget=b, device=device, argnums=0)(*args)
    most, least = (report(b).peak for b in ("all", 0.0))
    budgets = [int(b) for b in np.linspace(1.05 * most, least, 10)]
    needed = [temporaries(remat(f, budget=b, device=device), device, args) for b in budgets]
    assert all(need <= 1.05 * b for need, b in zip(needed, budgets, strict=True)), needed
    assert all(a >= b for a, b in itertools.pairwise(needed)), needed
    assert len(set(needed)) >= 6


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_model():
    params = llama.init(CONFIG, jax.random.key(0))
    draw = lambda high: np.random.default_rng(high).integers(0, high, SHAPE, np.int32)
    rows = Rows(draw(256), draw(1), draw(255))
    expected = jax.jit(jax.value_and_grad(loss))(params, rows)
    for budget in (0.0, 0.4, "all"):
        found = jax.jit(jax.value_and_grad(remat(loss, budget=budget)))(params, rows)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


SECONDS = """
import time
import jax, jax.numpy as jnp
from xform import remat

def layer(x, p):
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(y @ p["up"]) @ p["down"]

def loss(ps, x):
    for p in ps:
        x = layer(x, p)
    return (x**2).mean()

def scanned(p, x):
    return (jax.lax.scan(lambda x, p: (layer(x, p), None), x, p)[0] ** 2).mean()

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
params = lambda *lead: dict(up=f32(*lead, 256, 1024), down=f32(*lead, 1024, 256))
x = f32(512, 256)

def seconds(f, *args):
    start = time.process_time()
    jax.make_jaxpr(jax.grad(f))(*args)
    return time.process_time() - start

seconds(scanned, params(2), x), seconds(remat(scanned), params(2), x)  # imports, caches
body = seconds(remat(scanned), params(32), x) - seconds(scanned, params(32), x)
layers = [params() for _ in range(32)]
most = seconds(remat(loss), layers, x)
some = seconds(remat(loss, budget=60_000_000), layers, x)
print(body, most, some)
"""


@pytest.mark.slow
def test_planning_takes_a_tenth_of_a_second_a_body_and_three_for_32_layers():
    """Processor time, without the checks that other tests run under; the best of three runs."""
    run = lambda: subprocess.check_output(
        [sys.executable, "-c", SECONDS], cwd=Path(__file__).parents[2], text=True
    )
    body, most, some = np.min([[float(s) for s in run().split()] for _ in range(3)], axis=0)
    assert body < 0.1
    assert most < 3
    assert some < 3
