"""Builds scans, branches, remat, kernels and `shard_map` anew, bodies in a policy's dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, JaxprEqn
from xform._fuse._primitive import fused as fuse_program
from xform._precision._caster import Caster
from xform._precision._held import Held, join, slots
from xform.jaxpr._walk import source_line


def _closed(
    caster: Caster,
    body: Jaxpr,
    kinds: Sequence[str],
    state: Sequence,
    want: Sequence[str] | None = None,
) -> tuple[Callable, list[str]]:
    """A body as a function of arrays, and a list that says the kinds of its results."""
    found: list[str] = []

    def run(*arrays):
        outs = caster.run(body, list(map(Held, arrays, kinds)), state)
        if want is not None:
            outs = [caster.cast(h, kind) for h, kind in zip(outs, want, strict=True)]
        found[:] = [h.kind for h in outs]
        return [jnp.asarray(h.array) for h in outs]

    return run, found


def remat(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    params = eqn.params
    kinds = [h.kind for h in held]
    run, found = _closed(caster, params["jaxpr"], kinds, state)
    if params["differentiated"]:  # in a gradient that is already taken
        body = jax.make_jaxpr(run)(*(h.array for h in held))
        outs = eqn.primitive.bind(*(h.array for h in held), **dict(params, jaxpr=body))
    else:
        kept = dict(prevent_cse=params["prevent_cse"], policy=params["policy"])
        outs = jax.checkpoint(run, **kept)(*(h.array for h in held))
    return list(map(Held, outs, found))


def fused(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    """One kernel still, of the program in other dtypes."""
    run, found = _closed(caster, eqn.params["call_jaxpr"], [h.kind for h in held], state)
    arrays = [jnp.asarray(h.array) for h in held]
    program = jax.make_jaxpr(run)(*arrays)
    outs = fuse_program(program, *arrays, donated=eqn.params["donated"])
    return list(map(Held, outs, found))


def scan(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    params, body = eqn.params, eqn.params["jaxpr"]
    rank = lambda xs, ys: sum(x.aval.ndim == y.aval.ndim for x, y in zip(xs, ys, strict=True))
    carry = rank(eqn.outvars, body.outvars)
    consts = rank(eqn.invars, body.invars) - carry
    fixed, init, xs = held[:consts], held[consts : consts + carry], held[consts + carry :]
    arrays = [[h.array for h in part] for part in (fixed, xs)]

    def turn(kinds: Sequence[str], want: Sequence[str] | None):
        inner = [h.kind for h in fixed] + list(kinds) + [h.kind for h in xs]
        found: list[str] = []

        def step(values, x):
            x, mine = x
            run, kinds = _closed(caster, body, inner, mine, want)
            outs = run(*arrays[0], *values, *x)
            found[:] = kinds
            return outs[:carry], outs[carry:]

        return step, found

    def kinds_after(kinds: Sequence[str]) -> list[str]:
        step, found = turn(kinds, None)
        one = lambda x: lax.index_in_dim(x, 0, keepdims=False)
        none = lambda x: jnp.zeros(x.shape[1:], x.dtype)
        first = one if params["length"] else none
        begin = lambda x: step(_start(caster, init, kinds), jax.tree.map(first, x))
        jax.eval_shape(begin, (arrays[1], list(state)))
        return found

    kinds, ys = _settle([h.kind for h in init], kinds_after, carry)
    step, found = turn(kinds, [*kinds, *ys])
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    values, stacked = lax.scan(
        step, _start(caster, init, kinds), (arrays[1], list(state)), **options
    )
    return list(map(Held, [*values, *stacked], found or [*kinds, *ys]))


def _start(caster: Caster, init: Sequence[Held], kinds: Sequence[str]) -> list:
    """What a loop begins with, in the kinds that it carries."""
    return [jnp.asarray(caster.cast(h, kind).array) for h, kind in zip(init, kinds, strict=True)]


def _settle(kinds: list[str], after: Callable, carry: int) -> tuple[list[str], list[str]]:
    """The kinds of what a loop carries that each turn leaves as they are, and of the rest."""
    while True:
        found = after(kinds)
        joined = [join(pair) for pair in zip(kinds, found[:carry], strict=True)]
        if joined == kinds:
            return kinds, found[carry:]
        kinds = joined


def while_(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    del state
    params = eqn.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    test, fixed, init = held[:n], held[n : n + m], held[n + m :]
    inner = [h.kind for h in fixed]

    def after(kinds: Sequence[str]) -> list[str]:
        run, found = _closed(caster, params["body_jaxpr"], [*inner, *kinds], ())
        jax.eval_shape(lambda: run(*(h.array for h in fixed), *_start(caster, init, kinds)))
        return found

    kinds, _ = _settle([h.kind for h in init], after, len(init))
    body, _ = _closed(caster, params["body_jaxpr"], [*inner, *kinds], (), kinds)
    ends, _ = _closed(caster, params["cond_jaxpr"], [*(h.kind for h in test), *kinds], ())
    outs = lax.while_loop(
        lambda values: ends(*(h.array for h in test), *values)[0],
        lambda values: body(*(h.array for h in fixed), *values),
        _start(caster, init, kinds),
    )
    return list(map(Held, outs, kinds))


def cond(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    index, *operands = held
    arrays, kinds = [h.array for h in operands], [h.kind for h in operands]
    left, runs, found = list(state), [], []
    parts = []
    for body in eqn.params["branches"]:
        count = len(slots(body)) if state else 0
        parts.append((body, left[:count]))
        left = left[count:]
        run, own = _closed(caster, body, kinds, parts[-1][1])
        jax.eval_shape(run, *arrays)
        found.append(list(own))
    want = [join(each) for each in zip(*found, strict=True)]
    runs = [_closed(caster, body, kinds, mine, want)[0] for body, mine in parts]
    return list(map(Held, lax.switch(index.array, runs, *arrays), want))


def shard_map(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    params = eqn.params
    kinds = [h.kind for h in held]
    found: list[str] = []

    def body(arrays, state):
        run, own = _closed(caster, params["jaxpr"], kinds, state)
        outs = run(*arrays)
        found[:] = own
        return outs

    outs = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), jax.sharding.PartitionSpec()),
        out_specs=list(params["out_specs"]), axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )([h.array for h in held], list(state))  # fmt: skip
    return list(map(Held, outs, found))


def hijax(caster: Caster, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
    del held, state
    name = type(eqn.params["_prim"]).__name__
    raise NotImplementedError(
        f"`precision` can't build the hijax primitive `{name}` of {source_line(eqn)} again around "
        "a body in other dtypes. If it is a remat, switch off `jax_remat3`; keep any other outside "
        "of the function that `precision` is given."
    )
