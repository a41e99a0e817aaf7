"""What attention means, as a table: each case runs on every implementation, here and on a GPU.

The truth is another program: the list of visible pairs, one after the other, in float64, with JAX's
own derivatives of it. What is hidden is not in the list and so can have no influence. The same list
at the precision of the inputs says how large an error may be (`tests.oracle`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracle import UNOPTIMISED, assert_as_right_as, in_float64, once
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents, prefix, sliding_window


def _nothing(captures):
    return None


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention and its derivative.

    Attributes:
      shape: `B T S H K D V`.
      dtype: of q, k and v.
      score, mask: `captures -> mod`.
      captures: shapes of random float32 arrays that the mods read.
      alter: changes the operands `{"q", "k", "v", "captures", "sinks"}`.
      sinks: whether there are any.
      aux: further results, whose gradients count too.
      options: passed on.
      optimised: whether XLA optimises the program: it may then round twice where it fuses.
    """

    shape: tuple[int, int, int, int, int, int, int]
    dtype: str = "float32"
    score: Callable = _nothing
    mask: Callable = _nothing
    captures: tuple[tuple[int, ...], ...] = ()
    alter: Callable = lambda x: x
    sinks: bool = False
    aux: tuple[str, ...] = ("lse",)
    options: dict = dataclasses.field(default_factory=dict)
    optimised: bool = False

    def inputs(self, seed: int = 0):
        """Operands and a cotangent of every result, as numpy arrays."""
        rng = np.random.default_rng(seed)
        b, t, s, h, kv, d, v = self.shape
        normal = lambda shape, dtype: rng.normal(size=shape).astype(jnp.dtype(dtype))
        shapes = {"q": (b, t, h, d), "k": (b, s, kv, d), "v": (b, s, kv, v)}
        x: dict[str, Any] = {n: normal(shape, self.dtype) for n, shape in shapes.items()}
        x["captures"] = [normal(shape, "float32") for shape in self.captures]
        if self.sinks:
            x["sinks"] = normal((h,), "float32")
        cts = {"out": normal((b, t, h, v), self.dtype)}
        wide = jnp.promote_types(self.dtype, jnp.float32)
        return self.alter(x), cts | {name: normal((b, t, h), wide) for name in self.aux}

    def attend(self, x, implementation: str | None):
        """The results by name."""
        out, aux = flex_attention(
            x["q"], x["k"], x["v"], sinks=x.get("sinks"), aux=self.aux,
            score_mod=self.score(x["captures"]), mask_mod=self.mask(x["captures"]),
            implementation=implementation, **self.options,
        )  # fmt: skip
        return {"out": out} | {name: getattr(aux, name) for name in self.aux}

    def pairs(self, x) -> tuple[np.ndarray, ...]:
        """The b, h, q and k of all visible pairs."""
        b, t, s, h, *_ = self.shape
        index = np.indices((b, h, t, s), np.int32).reshape(4, -1)
        if self.mask(x["captures"]) is not None and index.size:
            see = lambda captures, *index: jax.vmap(self.mask(captures))(*index)
            index = index[:, np.asarray(once(see, x["captures"], *index))]
        return tuple(index)

    def by_pairs(self, x, pairs, flash: bool = False):
        """The results by name, from the list of visible pairs; see `as_flash`."""
        b, t, _, h, kv, d, _ = self.shape
        dtype, wide = x["q"].dtype, jnp.promote_types(x["q"].dtype, jnp.float32)
        at_b, at_h, at_q, at_k = map(jnp.asarray, pairs)
        head = at_h // (h // kv)
        q, k, v = x["q"][at_b, at_q, at_h], x["k"][at_b, at_k, head], x["v"][at_b, at_k, head]
        scale = self.options.get("scale", max(d, 1) ** -0.5)
        s = jnp.einsum("pd,pd->p", q, k, preferred_element_type=wide, precision="highest") * scale
        if (mod := self.score(x["captures"])) is not None:
            s = jax.vmap(mod)(s, at_b, at_h, at_q, at_k).astype(wide)
        row = (at_b * t + at_q) * h + at_h
        sinks = x["sinks"] if self.sinks else jnp.full(h, -jnp.inf)
        sinks = jnp.broadcast_to(sinks.astype(wide), (b, t, h)).reshape(-1)
        rows = functools.partial(as_written, dtype)
        if flash:
            values = jnp.repeat(x["v"], h // kv, 2)
            rows = functools.partial(as_flash, (at_b, at_h, at_q, at_k), values)
        found = rows(row, s, v.astype(wide), sinks)
        results: dict[str, Any] = dict(zip(("out", "lse", "max"), found, strict=True))
        results["out"] = results["out"].astype(dtype)
        return {n: results[n].reshape(b, t, h, *results[n].shape[1:]) for n in ("out", *self.aux)}


def as_written(dtype, row, s, v, sinks, weights=None):
    """Output, log-sum-exp and maximum of each row, of the pairs' scores and values.

    Args:
      dtype: what weights are rounded to.
      row: of each pair.
      weights: those of the output, if others: `(scores, maxima) -> weights` of any scale.
    """
    rows = lambda f, x: f(x, row, len(sinks))
    largest = rows(jax.ops.segment_max, s)
    top = jax.lax.stop_gradient(jnp.maximum(largest, sinks))
    e = jnp.exp(s - top[row])
    sink = jnp.where(jnp.isneginf(sinks), 0, jnp.exp(sinks - top))
    total = rows(jax.ops.segment_sum, e) + sink
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    p = e / safe[row] if weights is None else weights(s, top[row])
    out = rows(jax.ops.segment_sum, _rounded(p, dtype)[:, None] * v)
    if weights is not None:
        out /= jnp.where(empty, 1, rows(jax.ops.segment_sum, p) + sink)[:, None]
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe) + jnp.where(empty, 0, top))
    return out, lse, largest


@jax.custom_vjp
def as_flash(pairs, values, row, s, v, sinks):
    """`as_written`, as every fused kernel does it (arXiv:2205.14135, B.4).

    Weights are powers of two that add up to anything, and are rounded as such. What a row's weights
    pull back is `dO . O`, of the output as it was written, instead of a sum over the row, and
    `dO V^T` is a product of matrices, `values` being `[B,T,H,V]`: so derivatives of scores add up
    to zero no better than weights and outputs are rounded and that product is.
    """
    del pairs
    return as_written(values.dtype, row, s, v, sinks, _by_powers_of_two)


def _by_powers_of_two(s, top):
    """`exp2(s log2(e) - top log2(e))`, of which the second product is rounded and the first is not.

    So of scores near 10,000 the largest weight is off 1 by some 1e-4.
    """
    factor, wide = np.float32(np.log2(np.e)), lambda x: x.astype(jnp.float64)
    return jnp.exp2(wide(s) * factor - wide(top * factor)).astype(s.dtype)


def _flash_forward(pairs, values, row, s, v, sinks):
    results = out, lse, _ = as_flash(pairs, values, row, s, v, sinks)
    return results, (pairs, values, row, s, sinks, _rounded(out, values.dtype), lse)


def _flash_backward(kept, cts):
    (at_b, at_h, at_q, at_k), values, row, s, sinks, out, lse = kept
    (b, _, h, size), dtype = values.shape, values.dtype
    d_out = cts[0].reshape(b, len(sinks) // max(1, b * h), h, size).astype(dtype)
    product = jnp.einsum("bthv,bshv->bhts", d_out, values, preferred_element_type=s.dtype)
    pull = (cts[0] * out).sum(-1) - cts[1]
    p = jnp.exp(s - lse[row])
    d_s = p * (product[at_b, at_h, at_q, at_k] - pull[row])
    d_v = _rounded(p, dtype)[:, None] * cts[0][row]
    d_sinks = jnp.where(jnp.isneginf(sinks), 0, -jnp.exp(sinks - lse) * pull)
    return None, None, None, d_s, d_v, d_sinks


as_flash.defvjp(_flash_forward, _flash_backward)


def _rounded(p, dtype):
    """As the operand of a product is; a pair of casts XLA would leave out."""
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(p, int(bits.nexp), int(bits.nmant))


def value_and_grads(f: Callable, x, cts):
    """Results and the gradients of all operands."""
    results, pull = jax.vjp(f, x)
    (grads,) = pull({name: ct.astype(results[name].dtype) for name, ct in cts.items()})
    return results, grads


def check(
    case: Case, *implementations: str | None, seed: int = 0, draws: int = 1, flash: bool = False
) -> None:
    """Asserts that implementations give the results and gradients of a case.

    The list at the precision of the inputs is summed in four orders, and the worst counts: one sum
    of many numbers may come out right by luck. So may a gradient that is a single number: some
    `draws` of inputs are taken together then. With `flash`, results may be off as those of a fused
    kernel's derivative are (`as_flash`) on the same device.
    """
    solve = _solver(case, implementations, flash)
    runs = [solve(seed) for seed in range(seed, seed + draws)]
    true, judges, found = (_together(trees) for trees in zip(*runs, strict=True))
    for results in found:
        _compare(results, judges, true)


def _solver(case: Case, implementations: Sequence[str | None], flash: bool) -> Callable:
    """A function of a seed: the truth, what judges say, and what was found."""
    by_pairs = lambda x, cts, pairs: value_and_grads(lambda x: case.by_pairs(x, pairs), x, cts)
    judged = lambda x, cts, pairs: value_and_grads(lambda x: case.by_pairs(x, pairs, flash), x, cts)
    judge = jax.jit(judged, compiler_options=UNOPTIMISED)
    programs = [_program(case, how) for how in implementations]
    cpu = jax.local_devices(backend="cpu")[0]

    def solve(seed: int):
        with jax.enable_x64(case.dtype == "float64"):
            x, cts = case.inputs(seed)
            with jax.default_device(cpu):  # what is judged has no part in the judgement
                pairs = case.pairs(x)
            found = [program(x, cts) for program in programs]
            # Judged on the CPU, wherever it ran: XLA for GPUs leaves the judge's roundings out.
            # What it would leave out of `flash` is written so that it can't.
            if not flash:
                x, cts = jax.device_put((x, cts), cpu)
            orders = [np.random.default_rng(i).permutation(len(pairs[0])) for i in range(4)]
            with jax.enable_x64(case.dtype == "float64" or flash):
                judges = [judge(x, cts, tuple(i[order] for i in pairs)) for order in orders]
        with jax.default_device(cpu):
            true = in_float64(by_pairs, x, cts, pairs)
        return true, judges, found

    return solve


def _together(trees):
    """Leaf by leaf, the arrays of several problems of one kind in one."""
    stack = lambda *xs: xs[0] if len(xs) == 1 else np.stack([np.asarray(x) for x in xs])
    return jax.tree.map(stack, *trees)


def _program(case: Case, implementation: str | None) -> Callable:
    """Results and gradients by an implementation, compiled."""
    run = lambda x, cts: value_and_grads(lambda x: case.attend(x, implementation), x, cts)
    # XLA for CPU, unoptimised, gets the dense program's derivative of a maximum wrong.
    wrong = implementation == "reference" and "max" in case.aux
    return jax.jit(run, compiler_options=None if case.optimised or wrong else UNOPTIMISED)


def _compare(found, judges, true) -> None:
    for name, a, b in zip(*_flat(found, true), strict=True):
        for kind in (np.isnan, np.isposinf, np.isneginf):
            assert np.array_equal(kind(np.asarray(a, np.float64)), kind(b)), f"{name}: {kind}"
    finite = lambda tree: jax.tree.map(lambda a, b: np.where(np.isfinite(b), a, 0), tree, true)
    found, true, *judges = map(finite, (found, true, *judges))
    worst = lambda b, *xs: max(xs, key=lambda a: np.abs(np.asarray(a, np.float64) - b).sum())
    assert_as_right_as(found, jax.tree.map(worst, true, *judges), true)


def _flat(found, true):
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    return names, jax.tree.leaves(found), jax.tree.leaves(true)


def _spoil(bad: float, key: int = 5) -> Callable:
    """Puts `bad` into one key, its value and what the score mod reads of it."""

    def alter(x):
        captures = [_replaced(c, np.s_[..., key], bad) for c in x["captures"]]
        return x | {n: _replaced(x[n], np.s_[:, key], bad) for n in "kv"} | {"captures": captures}

    return alter


def _replaced(x: np.ndarray, at, value: float) -> np.ndarray:
    x = x.copy()
    x[at] = value
    return x


def _unseen(key: int = 5) -> Callable:
    return lambda c: lambda b, h, q, k: (k != key) & (q >= k)


def _by_key(c):
    return lambda s, b, h, q, k: s * c[0][k] + c[1][h, k]


IDS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4])

CASES = {
    "rows without a key": Case((2, 9, 9, 2, 1, 8, 8), mask=lambda c: ~causal(), aux=("lse", "max")),
    "a batch without a key": Case(
        (2, 7, 7, 2, 2, 8, 8), score=_by_key, captures=((7,), (2, 7)),
        mask=lambda c: lambda b, h, q, k: b == 0,
    ),
    "no visible pair": Case((1, 5, 7, 2, 1, 8, 8), mask=lambda c: prefix(0)),
    "more queries than keys": Case((1, 16, 8, 2, 2, 8, 8), mask=lambda c: causal(offset=-8)),
    "more keys than queries": Case((1, 8, 16, 2, 2, 8, 8), mask=lambda c: causal(offset=8)),
    "hidden NaN": Case(
        (1, 11, 11, 4, 2, 8, 8), score=_by_key, mask=_unseen(), captures=((11,), (4, 11)),
        alter=_spoil(np.nan), aux=("lse", "max"),
    ),
    "hidden infinity": Case(
        (1, 11, 11, 4, 2, 8, 8), score=_by_key, mask=_unseen(), captures=((11,), (4, 11)),
        alter=_spoil(np.inf),
    ),
    "hidden minus infinity": Case(
        (1, 11, 11, 4, 2, 8, 8), "bfloat16", score=_by_key, mask=_unseen(),
        captures=((11,), (4, 11)), alter=_spoil(-np.inf),
    ),
    "a mod that is NaN where hidden": Case(
        (1, 11, 11, 2, 2, 8, 8), mask=lambda c: lambda b, h, q, k: q > k, captures=((1,),),
        score=lambda c: lambda s, b, h, q, k: s + jnp.log((q - k) * jnp.exp(c[0][0])),
    ),
    "a NaN that is seen": Case(
        (1, 9, 9, 2, 1, 8, 8), mask=lambda c: causal(),
        alter=lambda x: x | {"q": _replaced(x["q"], np.s_[:, 4, 0], np.nan)},
    ),
    "no queries": Case((2, 0, 5, 4, 2, 8, 8), captures=((5,), (4, 5)), score=_by_key),
    "no keys": Case((2, 5, 0, 4, 2, 8, 8), aux=("lse", "max"), sinks=True),
    "no queries and no keys": Case((2, 0, 0, 4, 2, 8, 8)),
    "no batch": Case((0, 5, 6, 4, 2, 8, 8)),
    "values of no size": Case((1, 5, 6, 2, 2, 8, 0), mask=lambda c: prefix(4)),
    "heads of no size": Case((1, 5, 6, 2, 2, 0, 3)),
    "one by one": Case((1, 1, 1, 1, 1, 1, 1), aux=("lse", "max")),
    "odd sizes": Case((3, 13, 7, 6, 2, 5, 11), mask=lambda c: sliding_window(4, right=2)),
    "five to one": Case((1, 17, 17, 5, 1, 24, 7), mask=lambda c: causal(), sinks=True),
    "one query": Case((2, 1, 64, 4, 2, 16, 16), "bfloat16", mask=lambda c: prefix(37)),
    "float64": Case(
        (1, 13, 13, 4, 2, 8, 8), "float64", score=_by_key, captures=((13,), (4, 13)),
        mask=lambda c: causal() & documents(jnp.asarray(IDS)), sinks=True, aux=("lse", "max"),
    ),
    "bfloat16": Case((1, 40, 40, 4, 2, 16, 16), "bfloat16", mask=lambda c: causal(), sinks=True),
    "float16": Case((1, 40, 40, 4, 2, 16, 16), "float16", mask=lambda c: causal()),
    "scores of ten thousand": Case(
        (1, 24, 24, 2, 1, 24, 16), "bfloat16", mask=lambda c: causal(),
        alter=lambda x: x | {"q": 64 * x["q"], "k": 48 * x["k"]}, optimised=True,
    ),
    "scores near minus ten thousand": Case(
        (1, 24, 24, 2, 1, 16, 16), "bfloat16", captures=((24,),),
        score=lambda c: lambda s, b, h, q, k: 1.7 * s + (1e4 * c[0][k] / 3 - 1e4), optimised=True,
    ),
    "all scores near minus 100": Case(
        (1, 33, 33, 2, 2, 16, 16), mask=lambda c: causal(),
        score=lambda c: lambda s, b, h, q, k: s - 100, sinks=True,
    ),
    "the mod ignores its score": Case(
        (1, 9, 9, 2, 2, 8, 8), captures=((9,),), score=lambda c: lambda s, b, h, q, k: c[0][k - q],
    ),
    "all scores tie": Case(
        (1, 6, 9, 2, 1, 8, 8), captures=((6,),), aux=("lse", "max"), mask=lambda c: prefix(7),
        score=lambda c: lambda s, b, h, q, k: c[0][q],
    ),
    "reads out of range": Case(
        (1, 9, 9, 2, 2, 8, 8), captures=((5,), (4,)),
        score=lambda c: lambda s, b, h, q, k: (
            s + c[0][k - 20] * c[0][q + 4] + c[1].at[q + k].get(mode="fill", fill_value=-2.0)
        ),
    ),
    "soft cap, bias, window and sinks": Case(
        (2, 19, 19, 4, 2, 8, 8), captures=((4,), (4, 19, 19)), sinks=True,
        mask=lambda c: sliding_window(6) | prefix(2),
        score=lambda c: lambda s, b, h, q, k: 5 * jnp.tanh(s * c[0][h] / 5) + c[1][h, q, k],
    ),
}  # fmt: skip
