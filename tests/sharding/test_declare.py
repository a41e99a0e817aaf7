"""What a rule declares, and how it is read back from names."""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from xform.sharding import declare
from xform.sharding._declare import OPS, covering, declared, separate


def test_a_declaration_is_read_back_from_every_transform_of_it():
    @declare("sum of all", "dp", "tp", hidden="all-reduce", once=True)
    def f(x):
        return jnp.sin(x)

    g = jax.checkpoint(jax.vmap(lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]))
    text = jax.jit(jax.grad(lambda x: g(x).sum())).lower(jnp.ones(3)).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text or "")
    found = {d for name in names for d in declared(name)}
    (one,) = found
    assert (one.rule, one.axes, one.hidden, one.once) == (
        "sum of all",
        ("dp", "tp"),
        ("all-reduce",),
        True,
    )
    assert any("transpose" in name and declared(name) for name in names)


def test_the_innermost_declaration_that_names_all_axes_counts():
    name = "jit(f)/rule[outer|dp,tp|]/rule[inner|tp|]/psum"
    assert covering(name, ("tp",)).rule == "inner"
    assert covering(name, ("dp",)).rule == "outer"
    assert covering(name, ("dp", "tp")).rule == "outer"
    assert covering(name, ("pp",)) is None
    assert covering("jit(f)/psum", ()) is None


def test_a_declaration_refuses_what_could_not_be_read_back():
    with pytest.raises(ValueError, match=r"found 'a/b', 'x\|y'"), declare("a/b", "tp", "x|y"):
        pass
    with pytest.raises(ValueError, match=r"`hidden` is True or names of all-reduce.*'all_gather'"):
        declare("a", "dp", hidden=["all_gather"]).__enter__()


_NAMES = st.text("abcxyz019_.- ", min_size=1).filter(lambda s: s[0] not in " ")
_AXES = st.lists(st.text("abdp_0", min_size=1), max_size=3, unique=True)


@given(_NAMES, _AXES, st.lists(st.sampled_from(OPS), unique=True), st.booleans())
def test_what_a_declaration_says_is_what_is_read(rule, axes, hidden, once):
    @declare(rule, *axes, hidden=hidden, once=once)
    def f(x):
        return lax.sin(x)

    jaxpr = jax.make_jaxpr(f)(1.0)
    (one,) = declared(str(jaxpr.eqns[0].source_info.name_stack))
    assert (one.rule, one.axes, sorted(one.hidden), one.once) == (
        rule,
        tuple(axes),
        sorted(hidden),
        once,
    )


_PART = st.text("abc/[]|,", max_size=8).filter(lambda s: not s.startswith("("))


@given(_PART, st.lists(_PART, min_size=2, max_size=5))
def test_joined_names_are_taken_apart(head, parts):
    assert separate(f"{head}/({':'.join(parts)})") == [f"{head}/{part}" for part in parts]
    assert separate(f"jit({head})/sin") == [f"jit({head})/sin"]
