"""The primitive: one kernel, whose derivatives are kernels again.

`fused_p` holds a program that is known to be a region. Its derivative is that of `remat`: the
forward half, which returns what the cut between forward and backward pass saves, and one linear map
of that and the tangents. Both halves, and the linear map each way, are fused programs themselves;
so every order of derivatives is made of kernels, or refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, partial_eval

from xform._compat import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    apply_primitive,
    weakref_lru_cache,
)
from xform._fuse._lower import register
from xform._fuse._region import region_of
from xform._remat._cut import Graph, Settings, frontier
from xform._remat._halves import Halves
from xform._remat._jaxprs import build, flatten, live, retrace
from xform._remat._joint import linearize
from xform._remat._primitive import differentiated
from xform.jaxpr import intern

fused_p = Primitive("fused")
fused_p.multiple_results = True


def fused(jaxpr: Jaxpr, *args, donated: Sequence[bool] = ()) -> list:
    """Runs a program as one kernel, which reads what it needs, writes each value once, copies none.

    Args:
      jaxpr: the program.
      args: its arguments.
      donated: which of these a kernel may write over, where it can; none if empty.

    Raises:
      FusionError: it is none.
    """
    program, consts = flatten(jaxpr)
    known = dict(zip(program.invars, [*consts, *args], strict=True))
    outs = (v for v in program.outvars if isinstance(v, Var) and v not in known)
    if outs := list(dict.fromkeys(outs)):
        kernel, needed = _of(program, outs)
        given = [*[False] * len(consts), *(donated or [False] * len(args))]
        read = [x for x, n in zip(known.values(), needed, strict=True) if n]
        params = dict(call_jaxpr=kernel, donated=_where(needed, given))
        known.update(zip(outs, fused_p.bind(*read, **params), strict=True))
    number = lambda x: jnp.asarray(x.val, x.aval.dtype)
    return [number(x) if isinstance(x, Literal) else known[x] for x in program.outvars]


def _of(program: Jaxpr, outs: Sequence[Var]) -> tuple[Jaxpr, list[bool]]:
    """The kernel of some values of a program, and which inputs it reads.

    Raises:
      FusionError: it is none.
    """
    eqns = live(program.eqns, outs)
    reads = {v for eqn in eqns for v in eqn.invars if isinstance(v, Var)}.union(outs)
    needed = [v in reads for v in program.invars]
    inputs = [v for v, n in zip(program.invars, needed, strict=True) if n]
    kernel = intern(build(inputs, outs, eqns))
    region_of(kernel)
    return kernel, needed


def _where(needed: Sequence[bool], given: Sequence[bool]) -> tuple[bool, ...]:
    """Of what is needed, what is given."""
    return tuple(g for g, n in zip(given, needed, strict=True) if n)


def _type(*avals, call_jaxpr: Jaxpr, donated: tuple[bool, ...]):
    del avals, donated
    return call_jaxpr.out_avals, call_jaxpr.effects


# ---- derivatives ---------------------------------------------------------------------------------

_AGAIN = frozenset(("random",))
"""What a backward kernel computes again beside what is elementwise: reductions are saved."""


@dataclass(frozen=True, eq=False)
class _Halves:
    """The halves of a fused program, each fused: the linear map that `remat`'s primitive runs."""

    halves: Halves

    @property
    def count(self) -> int:
        return self.halves.count

    @property
    def results(self) -> Sequence:
        return self.halves.results

    @property
    def effects(self) -> frozenset:
        return self.halves.effects

    @cached_property
    def tangents(self) -> Jaxpr:
        return _as_one(self.halves.tangents)

    def backward(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
        program, gone = self.halves.backward(zeros)
        return _as_one(program), gone


def _as_one(program: Jaxpr) -> Jaxpr:
    """The program of one equation, a fused one."""
    return retrace(lambda *args: fused(program, *args), program.in_avals)


@weakref_lru_cache
def _halves_of(jaxpr: Jaxpr, active: tuple[bool, ...]) -> _Halves:
    settings = Settings(_AGAIN, (True,) * len(active))
    joint = linearize(jaxpr, active)
    return _Halves(Halves(joint, frontier(Graph(joint, settings))[-1], barrier=False))


def _jvp(primals, tangents, *, call_jaxpr: Jaxpr, donated: tuple[bool, ...]):
    """Its forward half may save what it reads, and writes over nothing."""
    del donated
    active = tuple(not isinstance(t, ad.Zero) for t in tangents)
    linear = _halves_of(call_jaxpr, active)
    return differentiated(linear.halves, linear, fused, primals, tangents)


def _transpose(cts, *args, call_jaxpr: Jaxpr, donated: tuple[bool, ...]):
    """Of a program that is linear in some arguments."""
    del donated
    unknown = [ad.is_undefined_primal(x) for x in args]
    known = [x for x, u in zip(args, unknown, strict=True) if not u]
    there = [not isinstance(ct, ad.Zero) for ct in cts]
    gone: list[bool] = []

    def backward(*given):
        values, found = iter(given[: len(known)]), iter(given[len(known) :])
        primals = [x if u else next(values) for x, u in zip(args, unknown, strict=True)]
        full = [next(found) if t else ct for t, ct in zip(there, cts, strict=True)]
        back = ad.backward_pass(call_jaxpr, True, (), primals, full)
        outs = [ct for ct, u in zip(back, unknown, strict=True) if u]
        gone[:] = [isinstance(ct, ad.Zero) for ct in outs]
        return [ct for ct in outs if not isinstance(ct, ad.Zero)]

    given = [*known, *(ct for ct, t in zip(cts, there, strict=True) if t)]
    found = iter(fused(retrace(backward, [jax.typeof(x) for x in given]), *given))
    left = iter(gone)
    return [(None if next(left) else next(found)) if u else None for u in unknown]


# ---- vmap, dead code -----------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, call_jaxpr: Jaxpr, donated: tuple[bool, ...]):
    """One more line of rows, or what the batching rules make of it: a program, looked at anew."""
    batched, moved = batching.batch_jaxpr_axes(
        call_jaxpr, axis_data, dims, [batching.zero_if_mapped] * len(call_jaxpr.outvars)
    )
    return fused(batched, *args, donated=donated), [0 if m else None for m in moved]


def _without_dead(used: list[bool], eqn: JaxprEqn):
    """The kernel of the results that are used."""
    program = eqn.params["call_jaxpr"]
    if not any(used):
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    kernel, needed = _of(program, [v for v, u in zip(program.outvars, used, strict=True) if u])
    new = eqn.replace(
        invars=[x for x, n in zip(eqn.invars, needed, strict=True) if n],
        outvars=[v for v, u in zip(eqn.outvars, used, strict=True) if u],
        params=dict(call_jaxpr=kernel, donated=_where(needed, eqn.params["donated"])),
        effects=kernel.effects,
    )
    return needed, new


# ---- registrations -------------------------------------------------------------------------------

fused_p.def_impl(partial(apply_primitive, fused_p))
fused_p.def_effectful_abstract_eval(_type)
ad.primitive_jvps[fused_p] = _jvp
ad.primitive_transposes[fused_p] = _transpose
batching.fancy_primitive_batchers[fused_p] = _batch
partial_eval.dce_rules[fused_p] = _without_dead
register(fused_p)
