"""Collectives in control flow that devices may leave each other in: found, and no others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xform._program import program
from xform.sharding import audit, declare, make_mesh
from xform.sharding._divergence import diverging

P = jax.P
S = jax.ShapeDtypeStruct


def varying(x, *axes):
    return lax.pcast(x, axes, to="varying")


def swap(x):
    with declare("swap", "pp"):
        return lax.ppermute(x, "pp", [(0, 1), (1, 0)])


def total(x):
    with declare("total", "pp"):
        return lax.psum(x, "pp")


def in_branch(x):
    return lax.cond(lax.axis_index("pp") == 0, swap, lambda x: x, x)


def in_a_switch_in_a_scan(x):
    def body(c, _):
        return lax.switch(lax.axis_index("pp"), [swap, jnp.sin, jnp.cos, jnp.tanh], c), None

    return lax.scan(body, x, length=3)[0]


def in_a_loop(x):
    return lax.while_loop(lambda c: c.sum() < 3, lambda c: c + swap(c), x)


def in_its_condition(x):
    """The others have left when the last one asks."""

    def go_on(c):
        return (c[0].sum() < 3) & (total(c[1].sum()) < 1e9)

    return lax.while_loop(go_on, lambda c: (c[0] + 1, c[1]), (x, x))[0]


def after_a_loop_that_differs(x):
    """The number of turns differs, and with it what a branch is chosen by."""
    turns, _ = lax.while_loop(
        lambda c: c[1].sum() < 3, lambda c: (c[0] + 1, c[1] + 1), (varying(0, "pp"), x)
    )
    return lax.cond(turns > 2, swap, lambda x: x, x)


def around_a_scan(x):
    f = lambda x: lax.scan(lambda c, _: (c + swap(c), None), x, length=2)[0]
    return lax.cond(x.sum() > 0, f, lambda x: x, x)


def through_a_carry(x):
    """What differs enters the predicate only in the second turn."""

    def body(c, _):
        a, b, x = c
        x = lax.cond(a.sum() > 0, swap, lambda x: x, x)
        return (b, x[:1], x), None

    zero = varying(jnp.zeros(1), "pp")
    return lax.scan(body, (zero, zero, x), length=3)[0][2]


DIVERGING = [
    in_branch,
    in_a_switch_in_a_scan,
    in_a_loop,
    in_its_condition,
    after_a_loop_that_differs,
    around_a_scan,
    through_a_carry,
]


def agreed(x):
    """All devices ask the same."""
    return lax.cond(total(x.sum()) > 0, swap, lambda x: x, x)


def gathered(x):
    """Equal on all devices, though its type says that it may differ."""
    with declare("gather", "pp"):
        whole = lax.all_gather(x.sum(), "pp")
    return lax.while_loop(
        lambda c: c[1].sum() < 3, lambda c: (c[0] + swap(c[0]), c[1] + 1), (x, whole)
    )[0]


def other_axis(x):
    """Devices of a tensor group share their stage."""

    def f(x):
        with declare("row", "tp"):
            return lax.psum(varying(x, "tp"), "tp")

    return lax.cond(lax.axis_index("pp") == 0, f, lambda x: x, x)


def counted(x):
    return lax.fori_loop(0, 3, lambda _, x: x + swap(x), x)


def chosen_by_select(x):
    return jnp.where(lax.axis_index("pp") == 0, swap(x), x)


AGREEING = [agreed, gathered, other_axis, counted, chosen_by_select]


def offenders(f, check_vma):
    mesh = make_mesh(pp=4, tp=2)
    g = jax.shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"), check_vma=check_vma)
    args = (S((64,), jnp.float32, sharding=jax.NamedSharding(mesh, P("pp"))),)
    return audit(g, args, target=None, strict=False).offenders


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", DIVERGING, ids=lambda f: f.__name__)
def test_a_collective_where_devices_part_is_found(f, check_vma):
    (offender,) = offenders(f, check_vma)
    assert offender.kind == "diverging"
    op = "psum" if f is in_its_condition else "ppermute"
    assert offender.text.startswith(op)
    assert "over pp=4 in the" in offender.text
    assert "differs along pp" in offender.text


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", AGREEING, ids=lambda f: f.__name__)
def test_one_where_they_agree_is_not(f, check_vma):
    assert offenders(f, check_vma) == ()


def dealt(x):
    """What a router of experts sends: as many rows as it likes to each device."""
    sizes = jnp.ones(4, jnp.int32) + varying(jnp.zeros(4, jnp.int32), "pp")
    at = jnp.arange(4, dtype=jnp.int32) * sizes
    return lax.ragged_all_to_all(x, x * 0, at, sizes, at, sizes, axis_name="pp")


MOVES = {
    "ragged_all_to_all": dealt,
    "all_to_all": lambda x: lax.all_to_all(x, "pp", 0, 0, tiled=True),
    "all_gather": lambda x: lax.all_gather(x, "pp", tiled=True)[: x.size],
    "reduce_scatter": lambda x: jnp.tile(lax.psum_scatter(x, "pp", tiled=True), 4),
    "pmax": lambda x: varying(lax.pmax(x, "pp"), "pp"),
}


@pytest.mark.parametrize("name", MOVES)
def test_every_collective_of_a_stage_under_a_switch_is_found(name):
    """As of experts within a stage of a pipeline, which others are not in at that time."""

    def stage(x):
        with declare("experts", "pp"):
            return MOVES[name](x)

    switch = lambda x: lax.switch(lax.axis_index("pp"), [stage, jnp.sin, jnp.cos, jnp.tanh], x)
    mesh = make_mesh(pp=4, tp=2)
    f = jax.shard_map(switch, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))
    x = S((64,), jnp.float32, sharding=jax.NamedSharding(mesh, P("pp")))
    (found,) = diverging(program(jax.make_jaxpr(f)(x)))
    assert (found.op, found.axes, found.control) == (name, ("pp",), "cond")
