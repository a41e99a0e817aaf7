"""Arrays that a mesh splits, outside of `shard_map`: nothing moves, and no value changes."""

import contextlib
import re
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.oracle import UNOPTIMISED, once
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents

TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
SET = "explicit, set"  # as explicit, within `jax.set_mesh`
COLLECTIVE = r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)[a-z-]*\("


def collectives(run) -> set[str]:
    return set(re.findall(COLLECTIVE, run.as_text()))


def mesh(types):
    return jax.make_mesh((4, 2), ("dp", "tp"), (TYPES[types.partition(",")[0]],) * 2)


def entered(types):
    return jax.set_mesh(mesh(types)) if types == SET else contextlib.nullcontext()


def place(types, x, specs: Mapping[str, P]):
    """Every array on the mesh, whole where `specs` does not name it."""
    at = lambda name: NamedSharding(mesh(types), specs.get(name, P()))
    return {name: jax.device_put(a, at(name)) for name, a in x.items()}


def inputs(kv_heads=2):
    rng = np.random.default_rng(0)
    shapes = {
        "q": (4, 24, 4, 8), "k": (4, 24, kv_heads, 8), "v": (4, 24, kv_heads, 6), "sinks": (4,),
        "factor": (), "slopes": (4,), "table": (16,), "padding": (4, 24),
    }  # fmt: skip
    x = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    return x, jnp.asarray(np.sort(rng.integers(0, 3, (4, 24))))


def attend(x, ids, how=None, aux=("lse",)):
    """Mods that read by b and by h: these are those of the whole arrays, on every device."""

    def score(s, b, h, q, k):
        near = x["slopes"][h] * x["table"][jnp.minimum(q - k, 15)]
        return s * x["factor"] + near + x["padding"][b, k]

    return flex_attention(
        x["q"], x["k"], x["v"], score_mod=score, mask_mod=causal() & documents(ids),
        sinks=x["sinks"], dropout_rate=0.3, dropout_key=jax.random.key(3), aux=aux,
        implementation=how,
    )  # fmt: skip


def changes_what_it_reads(x):
    """A score of arrays that it reads as a whole, as JAX writes it for arrays on a mesh."""

    def score(s, b, h, q, k):
        table = x["table"].at[q % 16].set(0.5)
        return jax.lax.fori_loop(0, 2, lambda n, s: s + table[k % 16 + n] * x["slopes"][h], s)

    return score


@pytest.mark.parametrize(
    "types", ["explicit", *(pytest.param(t, marks=pytest.mark.slow) for t in ("auto", SET))]
)
def test_a_mod_may_change_and_loop_over_arrays_that_lie_on_a_mesh(types):
    def f(x):
        out = flex_attention(x["q"], x["k"], x["v"], score_mod=changes_what_it_reads(x))
        return jnp.sin(out).sum()

    x, _ = inputs()
    grads = jax.jit(jax.grad(f), compiler_options=UNOPTIMISED)
    true = grads(x)
    with entered(types):
        found = grads(place(types, x, {"q": P("dp"), "k": P("dp"), "v": P("dp")}))
    for name in ("q", "slopes", "table"):
        np.testing.assert_allclose(found[name], true[name], rtol=1e-5, atol=1e-6)


def loss(x, ids, how=None, aux=("lse",)):
    out, more = attend(x, ids, how, aux)
    return jnp.sin(out).sum() + sum(jnp.cos(3 * a).sum() for a in jax.tree.leaves(more))


BATCH = {"q": P("dp"), "k": P("dp"), "v": P("dp")}
HEADS = {name: P(None, None, "tp") for name in "qkv"} | {"sinks": P("tp")}
BOTH = {name: P("dp", None, "tp") for name in "qkv"} | {"sinks": P("tp")}
OWN = {"padding": P("dp"), "slopes": P("tp"), "ids": P("dp")}
SPLITS = {
    "batch and heads": (2, BOTH),
    "one key head for all": (1, BOTH | BATCH | {"q": P("dp", None, "tp")}),
    "batch": (2, BATCH),
    "heads": (2, HEADS),
    "nothing": (2, {}),
    "what is read at b and h too": (
        2,
        BOTH | {"padding": P("dp"), "slopes": P("tp"), "ids": P("dp")},
    ),
    "some of what is read": (2, BATCH | {"padding": P("dp")}),
}
QUICK = ("what is read at b and h too",)  # it splits batch and heads


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile(UNOPTIMISED)


@pytest.mark.parametrize("types", [*TYPES, SET])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SPLITS]
)
def test_split_arrays_stay_where_they_are(name, types):
    """Values and gradients are those of one device; only whole operands have a sum of gradients."""
    kv_heads, specs = SPLITS[name]
    x, ids = inputs(kv_heads)
    placed, placed_ids = place(types, x, specs), place(types, {"ids": ids}, specs)["ids"]
    with entered(types):
        run = compiled(jax.value_and_grad(loss), placed, placed_ids)
        found = run(placed, placed_ids)
    assert collectives(run) <= {"all-reduce"}
    true = once(jax.value_and_grad(partial(loss, how="reference")), x, ids)
    for key, grad in found[1].items():
        assert grad.sharding.is_equivalent_to(placed[key].sharding, grad.ndim), key
    for a, b in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("types", [*TYPES, SET])
def test_random_keys_of_a_mod_stay_whole_or_split(types):
    """One key for all, and one for each batch entry."""
    keys = {"one": jax.random.key(1), "each": jax.random.split(jax.random.key(2), 4)}
    q = {"q": inputs()[0]["q"]}

    def attend(x, keys):
        def mask(b, h, q, k):
            noise = jax.random.fold_in(keys["each"][b], 24 * q + k)
            return jax.random.bernoulli(noise, 0.7) | (q == k)

        score = lambda s, b, h, q, k: s + jax.random.uniform(jax.random.fold_in(keys["one"], k))
        return flex_attention(x["q"], x["q"], x["q"], score_mod=score, mask_mod=mask)

    placed = place(types, q, {"q": P("dp", None, "tp")})
    placed_keys = place(types, keys, {"each": P("dp")})
    with entered(types):
        run = compiled(attend, placed, placed_keys)
        found = run(placed, placed_keys)
    assert not collectives(run)
    np.testing.assert_allclose(found, once(attend, q, keys), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("types", [*TYPES, SET])
def test_derivatives_of_derivatives_stay_split(types):
    x, ids = inputs()
    specs = SPLITS["what is read at b and h too"][1]
    placed, placed_ids = place(types, x, specs), place(types, {"ids": ids}, specs)["ids"]

    def hvp(x, ids):
        f = jax.grad(lambda x: loss(x, ids, aux=("lse", "max")))
        return jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),))[1]

    with entered(types):
        found = compiled(hvp, placed, placed_ids)
    assert collectives(found) <= {"all-reduce"}
    # Of one device: XLA for CPU gets the second derivative of the dense program's maximum wrong.
    true = once(hvp, x, ids)
    for a, b in zip(*map(jax.tree.leaves, (found(placed, placed_ids), true)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("types", TYPES)
def test_a_dimension_of_vmap_may_be_split(types):
    x, ids = inputs()
    many = {n: jnp.stack([a, -a, 2 * a, a + 1]) if n in ("q", "table") else a for n, a in x.items()}
    placed = place(types, many, {"q": P("dp"), "table": P("dp")})
    axes = {n: 0 if n in ("q", "table") else None for n in x}
    each = jax.vmap(lambda x, ids: attend(x, ids)[0], (axes, None))
    placed_ids = place(types, {"ids": ids}, {})["ids"]
    run = compiled(each, placed, placed_ids)
    assert not collectives(run)
    found, whole = run(placed, placed_ids), compiled(each, many, ids)(many, ids)
    np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-5)


WRONG = {
    "along T": (BATCH | {"q": P("dp", "tp")}, r"`q` float32\[4, 24, 4, 8\] is split.*tp.* along T"),
    "along S": (
        BATCH | {"k": P("dp", "tp"), "v": P("dp", "tp")}, r"`k` .*along S.*`v` .* along S",
    ),
    "along D": (BATCH | {"q": P("dp", None, None, "tp")}, r"`q` .* along D"),
    "what a mod reads": (
        BATCH | {"table": P("dp")}, r"a captured array float32\[16\] is split .* dim 0",
    ),
    "what a mod reads at b, over another axis": (
        BATCH | {"padding": P("tp")},
        r"float32\[4, 24\] is split over \('tp',\) along dim 0, needed is \(\) or \('dp',\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", WRONG)
def test_another_split_is_an_error_that_says_what_to_do(name, types):
    specs, message = WRONG[name]
    x, ids = inputs()
    placed, placed_ids = place(types, x, specs), place(types, {"ids": ids}, {})["ids"]
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message) as error:
        jax.jit(attend).lower(placed, placed_ids).compile()
    assert "inside `jax.shard_map`" in str(error.value)
    assert "with_sharding_constraint" in str(error.value)


def test_types_must_agree_since_nothing_is_moved_silently():
    x, ids = inputs()
    placed, ids = place("explicit", x, BATCH | {"k": P()}), place("explicit", {"i": ids}, {})["i"]
    with pytest.raises(ValueError, match=r"`k` .* is split over \(\) along B, needed is \('dp',\)"):
        attend(placed, ids)
    placed = place("explicit", x, BOTH | {"k": P("dp")})
    with pytest.raises(ValueError, match=r"`k` .* is split over \(\) along H, needed is \('tp',\)"):
        attend(placed, ids)
