"""What is trained: counted by hand, by the example, and by the rules of `xform.cost`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import llama
import planned
from parallel import Layout
from tests.sharding.plan.shapes import predict
from xform.primitives.masks import causal
from xform.sharding import plan
from xform.sharding.pipeline import interleaved, one_f_one_b, zb_v

CONFIG = llama.Config(codes=512, layers=3, width=256, heads=4, kv_heads=2, head_size=32, hidden=640)
MODEL = plan.Model.of(CONFIG, 512)


def test_parameters_are_the_examples():
    params = jax.eval_shape(partial(llama.init, CONFIG), jax.random.key(0))
    assert MODEL.parameters == sum(x.size for x in jax.tree.leaves(params))


def test_flops_are_the_examples():
    assert MODEL.flops_per_token == llama.flops_per_token(CONFIG, 512)


def test_llama_3_is_as_large_as_it_is_called():
    assert plan.LLAMA_3_405B.parameters == pytest.approx(405e9, rel=0.005)


def layer(x, p):
    rotation = llama.rotations(jnp.arange(x.shape[1]), CONFIG)
    return llama.layer(x, p, causal(), rotation, CONFIG)[0]


@pytest.fixture(scope="module")
def given():
    params = jax.eval_shape(partial(llama.init, CONFIG), jax.random.key(0))["layers"]
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    x = jax.ShapeDtypeStruct((2, 512, CONFIG.width), jnp.float32)
    return x, jax.tree.map(one, params)


def test_the_examples_layer_traced_is_the_shape(given):
    traced = MODEL.with_layer(layer, *given)
    assert traced.products_share == pytest.approx(1.0)
    assert traced.parameters == MODEL.parameters
    assert traced.flops_per_token == pytest.approx(MODEL.flops_per_token)
    machine, layout = plan.machine("H200", 2), plan.Layout(dp=2)
    seconds = [predict(m, machine, layout, 4096).seconds for m in (MODEL, traced)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_layer_that_does_more_takes_longer(given):
    x, params = given
    more = lambda x, p: layer(layer(x, p), p)
    wide = dataclasses.replace(MODEL, layers=64)
    twice, once = wide.with_layer(more, x, params), wide.with_layer(layer, x, params)
    machine, layout = plan.machine("H200", 1), plan.Layout()
    a, b = (predict(m, machine, layout, 2**16).step.compute for m in (once, twice))
    assert b > 1.2 * a


@pytest.mark.parametrize(
    ("schedule", "name", "chunks"),
    [
        (one_f_one_b(2, 4), "1f1b", 1),
        (interleaved(2, 4, 3), "interleaved", 3),
        (zb_v(2, 4), "zb-v", 1),
    ],
    ids=["1f1b", "interleaved", "zb-v"],
)
def test_the_examples_layouts_in_the_planners_words(schedule, name, chunks):
    found = planned.layout_of(dict(dp=2, pp=2, tp=1), Layout(fsdp=True), schedule)
    assert (found.schedule, found.chunks, found.microbatches) == (name, chunks, 4)
    assert (found.dp, found.pp, found.zero, found.recompute) == (2, 2, 3, "full")
    assert found.stages == schedule.stages


def test_without_a_pipeline():
    found = planned.layout_of(dict(dp=2, tp=4), Layout(sequence=True, microbatches=3), None)
    assert (found.dp, found.tp, found.pp, found.microbatches) == (2, 4, 1, 3)
    assert found.sequence
    assert found.zero == 0
    assert "dp" not in found.overlap
