"""The model with experts: parameters, work, layouts, text that goes on, and what is refused."""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import llama
import parallel
import planned
import progress
import train
from cache import empty_cache
from parallel import Layout
from tests.examples.test_llama import SMALL, random_rows
from tests.oracle import once
from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on
from xform import cost, precision
from xform.sharding import audit, make_mesh, shardings
from xform.sharding.context import zigzag
from xform.train.data import Rows

slow = partial(pytest.param, marks=pytest.mark.slow)
EXPERTS = dataclasses.replace(
    SMALL, experts=8, top_k=2, shared=8, hidden=8, balance=0.5, router_z=0.1
)
DROPS = dataclasses.replace(EXPERTS, capacity=1.0, router="sigmoid", shared=0)
ALL = Layout(fsdp=True, sequence=True, overlap="ring")


@cache
def params_of(model: llama.Config) -> dict:
    return once(partial(llama.init, model), jax.random.key(1))


def test_specs_and_sizes_are_those_of_the_parameters():
    for model in (SMALL, EXPERTS, DROPS):
        params = params_of(model)
        assert jax.tree.structure(params) == jax.tree.structure(llama.specs_of(model))
    every, active = train.sizes_of(EXPERTS, params_of(EXPERTS))
    assert every - active == SMALL.layers * 3 * SMALL.width * 8 * (8 - 2)
    assert train.sizes_of(SMALL, params_of(SMALL)) == (every_of(SMALL),) * 2


def every_of(model):
    return sum(x.size for x in jax.tree.leaves(params_of(model)))


def test_flops_are_those_of_the_experts_that_a_token_goes_to(monkeypatch):
    """What MFU counts: exactly, whatever places a mesh or a capacity leaves empty."""
    length, batch = 16, 8
    wanted = batch * length * llama.flops_per_token(EXPERTS, length)
    config = train.Config(
        model=dataclasses.replace(EXPERTS, capacity=2.0), batch=batch, length=length
    )
    monkeypatch.setattr(progress, "memory", lambda grads: lambda *args: "")
    ran, model = progress.forecast(config, mesh_of(dp=1, tp=2, ep=4))
    assert model.model_flops == wanted
    assert int(ran.model_flops) > wanted  # pyright: ignore[reportArgumentType]
    assert ran.devices == 8


@cache
def whole(model: llama.Config):
    def mean(params, rows):
        total, labels = llama.loss(params, rows, model)
        return total / labels

    return on_one(jax.value_and_grad(mean), params_of(model), random_rows())


@pytest.mark.parametrize(
    ("sizes", "layout", "model"),
    [
        (dict(dp=2, tp=2, ep=2), Layout(fsdp=True, sequence=True), EXPERTS),
        slow(dict(dp=2, tp=2, ep=2), ALL, EXPERTS),
        slow(dict(dp=1, cp=2, tp=1, ep=4), Layout(context="all_gather"), EXPERTS),
        slow(dict(dp=2, tp=2, ep=2), Layout(), EXPERTS),
        slow(dict(dp=2, tp=2, ep=2), Layout(fsdp=True, keep=True), DROPS),
        slow(dict(dp=1, tp=2, ep=4), Layout(sequence=True), DROPS),
        slow(dict(dp=1, cp=2, tp=2, ep=2), dataclasses.replace(ALL, context="ring"), EXPERTS),
        slow(dict(dp=1, tp=1, ep=8), Layout(), EXPERTS),
    ],
    ids=lambda x: "MoE" if x is EXPERTS else "drops" if x is DROPS else str(x),
)
def test_loss_and_every_gradient_equal_those_of_one_device(sizes, layout, model):
    mesh = mesh_of(**sizes)
    specs = parallel.specs_for(layout, model, mesh)
    body = partial(parallel.loss_and_grads, model=model, layout=layout, specs=specs)
    rows = random_rows()
    if "cp" in mesh.shape:
        rows = zigzag(rows.tokens.shape[1], mesh.shape["cp"]).split(rows)
    args = (params_of(model), rows)
    found = run_on(mesh, body, (specs, parallel.specs_of_rows(mesh)), (P(), specs), args)
    assert_equal(found, whole(model), rtol=1e-10)


def test_a_text_that_is_extended_has_the_logits_of_the_whole():
    """With a capacity too, where text that goes on drops nothing."""
    params, T = params_of(EXPERTS), 12
    tokens = np.random.default_rng(6).integers(SMALL.codes, size=(2, T)).astype(np.int32)
    logits = once(partial(llama.logits, config=EXPERTS), params, tokens, np.zeros_like(tokens))
    tight = dataclasses.replace(EXPERTS, capacity=0.5)
    cache, found = empty_cache(tight, 2, T), []
    for part in np.split(tokens, [T - 1], axis=1):
        extended, cache = once(partial(llama.extend, config=tight), params, part, cache)
        found.append(extended)
    np.testing.assert_allclose(np.concatenate(found, 1), logits, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), ALL], ids=str)
def test_no_communication_is_undeclared(layout):
    """And there are two exchanges for each layer forward, and two back."""
    mesh = make_mesh(dp=2, tp=2, ep=2)
    params = jax.eval_shape(partial(llama.init, EXPERTS), jax.random.key(0))
    placed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    params = jax.tree.map(placed, params, parallel.placement(layout, EXPERTS, mesh))
    rows = Rows(*[np.zeros((8, 48), np.int32)] * 3)
    rows = jax.tree.map(lambda x: placed(x, shardings(mesh, parallel.specs_of_rows(mesh))), rows)
    sums = audit(parallel.sums(EXPERTS, mesh, layout), (params, rows), target=None)
    exchanges = [m.trips for m in sums.messages if m.op == "all-to-all"]
    assert sum(exchanges) == 2 * EXPERTS.layers
    grads = audit(parallel.gradients(EXPERTS, mesh, layout), (params, rows), target=None)
    exchanges = [m.trips for m in grads.messages if m.op == "all-to-all"]
    again = 2 * EXPERTS.layers if layout.fsdp else 0  # layers are computed once more
    assert sum(exchanges) == 4 * EXPERTS.layers + again


@pytest.mark.slow
def test_routers_are_float32_where_all_else_is_bfloat16():
    loss = precision(lambda p, rows: llama.loss(p, rows, EXPERTS)[0], "bf16")
    costs = cost(jax.grad(loss))(params_of(EXPERTS), random_rows())
    tokens = random_rows().tokens.size
    router = 3 * 2 * tokens * EXPERTS.layers * EXPERTS.width * EXPERTS.experts
    assert costs.total.matrix["float32@highest"] == router


def test_what_makes_no_sense_is_named_at_once():
    model = dataclasses.replace(SMALL, experts=4, top_k=5, capacity=0.0, balance=-1.0, shared=-1)
    with pytest.raises(ValueError, match=r"^config: ") as error:
        train.check(train.Config(model=model))
    for words in (
        "`top_k` is 5; needed is 1 to 4",
        "`capacity` is 0.0; needed is a number above 0",
        "model.balance=-1.0 must be a number that is not negative",
        "model.experts=4 and model.shared=-1 must be at least 0",
    ):
        assert words in str(error.value)
    dense = dataclasses.replace(SMALL, capacity=2.0)
    with pytest.raises(ValueError, match=r"model.capacity=2.0 and ep=2 without experts: set"):
        train.check(train.Config(model=dense, ep=2))
    dense = dataclasses.replace(SMALL, top_k=1, router="sigmoid", balance=0.0, router_z=0.0)
    with pytest.raises(ValueError, match=r"^config: ") as error:
        train.check(train.Config(model=dense))
    words = "model.top_k=1 and model.router=sigmoid and model.balance=0.0 and model.router_z=0.0"
    assert f"{words} without experts" in str(error.value)
    train.check(train.Config(model=SMALL))
    config = train.Config(model=dataclasses.replace(EXPERTS, experts=6), ep=4, tp=1, dp=2)
    with pytest.raises(ValueError, match=r"experts=6 is not a multiple of ep=4"):
        train.mesh_for(config)
    config = train.Config(model=EXPERTS, pp=2, tp=1, dp=4)
    with pytest.raises(ValueError, match=r"model.experts have a loss of their own"):
        train.mesh_for(config)


def test_the_default_mesh_divides_the_shared_units():
    config = train.Config(model=dataclasses.replace(EXPERTS, shared=33))
    assert train.mesh_for(config).shape["tp"] == 1
    assert train.mesh_for(dataclasses.replace(config, model=EXPERTS)).shape["tp"] == 2


def test_the_planner_is_not_told_of_a_layout_without_its_experts():
    with pytest.raises(ValueError, match=r"ep=4: the planner knows dp, pp, cp, tp"):
        planned.layout_of(dict(dp=2, ep=4), Layout(), None)
    assert planned.layout_of(dict(dp=2, ep=1), Layout(), None).dp == 2
