"""Two primitives: a region that knows what to save, and the linear map that it leaves behind.

`region` runs its program. Differentiated, it runs the forward half, and the tangents of its results
are `linear(saved, tangents)`: so what JAX keeps for the backward pass, in a scan or a shard_map as
elsewhere, is what was chosen, and no rule of JAX's has to be told. `linear` is an ordinary linear
function: its transpose is the backward half, its derivative that of what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.interpreters import ad, batching, mlir

from xform._compat import Jaxpr, Primitive, apply_primitive, weakref_lru_cache
from xform._remat._halves import Halves

region_p = Primitive("remat_region")
region_p.multiple_results = True
linear_p = Primitive("remat_linear")
linear_p.multiple_results = True


@runtime_checkable
class Plan(Protocol):
    """What a region does when it is differentiated; hashable."""

    def halves(self, jaxpr: Jaxpr, active: tuple[bool, ...]) -> Halves: ...

    def grown(self, before: int) -> Plan:
        """The plan of the same region with so many inputs more, before the others."""
        ...


def evaluate(jaxpr: Jaxpr, *args) -> list:
    """Runs a program, its equations under their own names and lines."""
    return eval_jaxpr(jaxpr, jaxpr.consts, *args)


# ---- region --------------------------------------------------------------------------------------


def region(jaxpr: Jaxpr, plan: Plan, args: Sequence[Any]) -> list:
    """Runs a program as a region; its constants become operands."""
    if jaxpr.consts:
        args = [*jaxpr.consts, *args]
        plan = plan.grown(len(jaxpr.consts))
        jaxpr = _opened(jaxpr)
    return region_p.bind(*args, call_jaxpr=jaxpr, plan=plan)


@weakref_lru_cache
def _opened(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.with_consts([])


def _region_eval(*args, call_jaxpr: Jaxpr, plan: Plan):
    del plan
    return evaluate(call_jaxpr, *args)


def _region_type(*avals, call_jaxpr: Jaxpr, plan: Plan):
    del avals, plan
    return call_jaxpr.out_avals, call_jaxpr.effects


@weakref_lru_cache
def halves_of(jaxpr: Jaxpr, active: tuple[bool, ...], plan: Plan) -> Halves:
    """The halves of a region, found once."""
    return plan.halves(jaxpr, active)


def _region_jvp(primals, tangents, *, call_jaxpr: Jaxpr, plan: Plan):
    active = tuple(not isinstance(t, ad.Zero) for t in tangents)
    halves = halves_of(call_jaxpr, active, plan)
    return differentiated(halves, halves, evaluate, primals, tangents)


def differentiated(
    halves: Halves, linear: Any, run: Callable[..., list], primals: Sequence, tangents: Sequence
) -> tuple[list, list]:
    """The results of a program and their tangents, given its halves.

    Args:
      halves: for the inputs that have tangents.
      linear: the linear map of what they save and tangents, as `linear_p` is to know it.
      run: `run(program, *args)` runs the forward half.
      primals: the inputs.
      tangents: theirs.
    """
    made = run(halves.forward, *primals)
    n = len(halves.joint.outputs)
    outs, rest = made[:n], iter(made[n:])
    given = dict(zip(halves.joint.inputs, primals, strict=True))
    saved = [given[v] if v in given else next(rest) for v in halves.saved]
    varying = halves.joint.varying
    moving = [t for t, a in zip(tangents, halves.joint.active, strict=True) if a]
    found = iter(linear_p.bind(*saved, *moving, linear=linear) if any(varying) else ())
    zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    return outs, [next(found) if v else zero(x) for v, x in zip(varying, outs, strict=True)]


def _region_batch(axis_data, args, dims, *, call_jaxpr: Jaxpr, plan: Plan):
    batched, moved = batching.batch_jaxpr_axes(
        call_jaxpr, axis_data, dims, [batching.zero_if_mapped] * len(call_jaxpr.outvars)
    )
    return region(batched, plan, args), [0 if m else None for m in moved]


def _region_transpose(cts, *args, call_jaxpr: Jaxpr, plan: Plan):
    """Of a region that is linear in some arguments already: nothing is left to be saved."""
    del plan
    found = ad.backward_pass(call_jaxpr, True, (), args, cts)
    return [x if ad.is_undefined_primal(a) else None for a, x in zip(args, found, strict=True)]


# ---- linear --------------------------------------------------------------------------------------


@runtime_checkable
class Linear(Protocol):
    """A linear map of tangents, given what was saved; `Halves` are one.

    Attributes:
      count: how many operands are saved values; the others are tangents.
      results: the types of its results.
    """

    @property
    def count(self) -> int: ...
    @property
    def results(self) -> Sequence: ...
    @property
    def effects(self) -> frozenset: ...
    @property
    def tangents(self) -> Jaxpr: ...
    def backward(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]: ...


@dataclass(frozen=True, eq=False)
class Batched:
    """The same under `vmap`: all tangents are batched along their first dimension."""

    of: Linear
    axis_data: Any
    dims: tuple[int | None, ...]

    @property
    def tangents(self) -> Jaxpr:
        n = len(self.of.results)
        return batching.batch_jaxpr_axes(self.of.tangents, self.axis_data, self.dims, [0] * n)[0]

    @property
    def within(self) -> Linear:
        """The map that was batched, maybe more than once."""
        return self.of.within if isinstance(self.of, Batched) else self.of

    @property
    def count(self) -> int:
        return self.of.count

    @property
    def results(self) -> Sequence:
        return self.tangents.out_avals

    @property
    def effects(self) -> frozenset:
        return self.of.effects

    def backward(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
        program, gone = self.of.backward(zeros)
        dims = [*self.dims[: self.count], *[0] * zeros.count(False)]
        n = len(program.outvars)
        return batching.batch_jaxpr_axes(program, self.axis_data, dims, [0] * n)[0], gone


def _linear_eval(*args, linear: Linear):
    return evaluate(linear.tangents, *args)


def _linear_type(*avals, linear: Linear):
    del avals
    return list(linear.results), linear.effects


def _linear_jvp(primals, tangents, *, linear: Linear):
    n = linear.count
    outs = linear_p.bind(*primals, linear=linear)
    dots = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    if any(not isinstance(t, ad.Zero) for t in tangents[n:]):
        moved = [ad.instantiate_zeros(t) for t in tangents[n:]]
        dots = linear_p.bind(*primals[:n], *moved, linear=linear)
    moving = [i for i in range(n) if not isinstance(tangents[i], ad.Zero)]
    if moving:

        def at(*some):
            saved = list(primals[:n])
            for i, x in zip(moving, some, strict=True):
                saved[i] = x
            return evaluate(linear.tangents, *saved, *primals[n:])

        more = jax.jvp(at, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
        dots = [ad.add_tangents(a, b) for a, b in zip(dots, more, strict=True)]
    return outs, dots


def _linear_transpose(cts, *args, linear: Linear):
    n = linear.count
    zeros = tuple(isinstance(ct, ad.Zero) for ct in cts)
    program, gone = linear.backward(zeros)
    given = [ct for ct in cts if not isinstance(ct, ad.Zero)]
    found = iter(evaluate(program, *args[:n], *given))
    return [None] * n + [None if g else next(found) for g in gone]


def _linear_batch(axis_data, args, dims, *, linear: Linear):
    n = linear.count
    if not linear.effects and all(d is None for d in dims):
        return linear_p.bind(*args, linear=linear), [None] * len(linear.results)
    front = lambda x, d: (
        jnp.broadcast_to(x[None], (axis_data.size, *x.shape))
        if d is None
        else jnp.moveaxis(x, d, 0)
    )
    moved = [*args[:n], *map(front, args[n:], dims[n:])]
    dims = (*dims[:n], *[0] * (len(args) - n))
    batched = Batched(linear, axis_data, dims)
    return linear_p.bind(*moved, linear=batched), [0] * len(linear.results)


# ---- registrations -------------------------------------------------------------------------------

for _p, _run in ((region_p, _region_eval), (linear_p, _linear_eval)):
    _p.def_impl(lambda *args, p=_p, **params: apply_primitive(p, *args, **params))
    mlir.register_lowering(_p, mlir.lower_fun(_run, multiple_results=True))

region_p.def_effectful_abstract_eval(_region_type)
ad.primitive_jvps[region_p] = _region_jvp
ad.primitive_transposes[region_p] = _region_transpose
batching.fancy_primitive_batchers[region_p] = _region_batch

linear_p.def_effectful_abstract_eval(_linear_type)
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.fancy_primitive_batchers[linear_p] = _linear_batch
