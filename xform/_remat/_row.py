"""A row of regions as one graph: the halves of each, put together.

JAX would trace all that the layers compute once more for each plan that is tried, forwards and
backwards. But the halves are there: the row's first part calls theirs in order, and its linear part
backwards calls theirs in the opposite order, and adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.interpreters import ad

from xform._compat import Jaxpr, JaxprEqn, Var, new_jaxpr_eqn, source_info_util
from xform._remat._halves import Halves
from xform._remat._jaxprs import Atom, build, call, equations, flatten, substitute
from xform._remat._joint import Joint, transpose
from xform._remat._primitive import halves_of, linear_p, region_p

# What picks a part out of an array, or sees it in another shape.
_PICKS = ("slice", "squeeze", "reshape", "expand_dims", "unstack")


def is_row(jaxpr: Jaxpr) -> bool:
    """Whether a program is regions, with what they read of its arguments, and nothing else."""
    apart = len(picks(jaxpr.eqns, jaxpr.invars))
    return apart + sum(eqn.primitive is region_p for eqn in jaxpr.eqns) == len(jaxpr.eqns)


def picks(eqns: Iterable[JaxprEqn], inputs: Iterable[Var]) -> list[JaxprEqn]:
    """The equations that pick a part out of an input, as a layer does out of stacked parameters."""
    known = set(inputs)
    found = []
    for eqn in eqns:
        picks_out = eqn.primitive.name in _PICKS
        if picks_out and all(isinstance(v, Var) and v in known for v in eqn.invars):
            known.update(eqn.outvars)
            found.append(eqn)
    return found


def before_readers(picked: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """All of these equations, each of the first right before another reads it, if one does."""
    maker = {v: eqn for eqn in picked for v in eqn.outvars}
    ordered: list[JaxprEqn] = []

    def add(eqn: JaxprEqn) -> None:
        for v in eqn.invars:
            if isinstance(v, Var) and (before := maker.pop(v, None)) is not None:
                add(before)
        ordered.append(eqn)

    for eqn in eqns:
        add(eqn)
    return [*ordered, *maker.values()]


def linearize_row(jaxpr: Jaxpr, active: tuple[bool, ...]) -> Joint:
    """Returns the joint graph of a row of regions, for these inputs' tangents."""
    inputs = (v for v, is_active in zip(jaxpr.invars, active, strict=True) if is_active)
    moves: dict[Atom, Var] = {v: Var(v.aval.to_tangent_aval()) for v in inputs}
    tangents = list(moves.values())
    first: list[JaxprEqn] = []
    linear: list[JaxprEqn] = []
    hosts: dict[Atom, Atom] = {}
    for eqn in jaxpr.eqns:
        moving = tuple(isinstance(v, Var) and v in moves for v in eqn.invars)
        if not any(moving):
            first.append(eqn)
            continue
        if eqn.primitive is not region_p:
            first.append(eqn)
            moves.update((v, Var(v.aval.to_tangent_aval())) for v in eqn.outvars)
            own = [v for v in [*eqn.invars, *eqn.outvars] if isinstance(v, Var)]
            linear.append(substitute(eqn, {v: moves[v] for v in own}))
            continue
        halves = halves_of(eqn.params["call_jaxpr"], moving, eqn.params["plan"])
        given = dict(zip(halves.joint.inputs, eqn.invars, strict=True))
        halves = halves.hosting(v for v, w in given.items() if isinstance(w, Var) and w in hosts)
        given = {v: hosts.get(w, w) if isinstance(w, Var) else w for v, w in given.items()}
        saved = [given[v] if v in given else Var(halves.held(v)) for v in halves.saved]
        made = [w for v, w in zip(halves.saved, saved, strict=True) if v not in given]
        first.append(call(halves.forward, eqn.invars, [*eqn.outvars, *made]))
        hosts |= _handed_on(halves, eqn.outvars, saved)
        varying = [v for v, on in zip(eqn.outvars, halves.joint.varying, strict=True) if on]
        if varying:
            before = [moves[v] for v, on in zip(eqn.invars, moving, strict=True) if on]
            moves.update((v, Var(t)) for v, t in zip(varying, halves.results, strict=True))
            linear.append(_linear(eqn, halves, [*saved, *before], [moves[v] for v in varying]))
    varying = tuple(isinstance(v, Var) and v in moves for v in jaxpr.outvars)
    outs = [moves[v] for v, on in zip(jaxpr.outvars, varying, strict=True) if on]
    maps = (eqn for eqn in linear if eqn.primitive is linear_p)
    reads = (v for eqn in maps for v in eqn.invars[: eqn.params["linear"].count])
    needed = list(dict.fromkeys(v for v in reads if isinstance(v, Var)))
    whole, consts = flatten(build(jaxpr.invars, [*jaxpr.outvars, *needed], first))
    n = len(jaxpr.outvars)
    merged = dict(zip(needed, whole.outvars[n:], strict=True))
    linear = [substitute(eqn, merged) for eqn in linear]
    needed = list(dict.fromkeys(v for v in merged.values() if isinstance(v, Var)))
    return Joint(
        whole.invars[len(consts) :], dict(zip(whole.invars, consts, strict=False)), whole.eqns,
        whole.outvars[:n], needed, build([*needed, *tangents], outs, linear), active, varying,
        _transpose,
    )  # fmt: skip


def _handed_on(halves: Halves, outputs: Sequence[Var], saved: Sequence[Atom]) -> dict[Atom, Atom]:
    """The results of a region that the host keeps, and what it keeps."""
    held = dict(zip(halves.saved, saved, strict=True))
    name = {named: v for v, names in halves.cut.hosted.items() for named in names}
    results = zip(halves.joint.outputs, outputs, strict=True)
    return {w: held[name[v]] for v, w in results if isinstance(v, Var) and v in name}


def _linear(eqn: JaxprEqn, halves: Halves, reads: list, makes: list) -> JaxprEqn:
    params = dict(linear=halves)
    return new_jaxpr_eqn(reads, makes, linear_p, params, halves.effects, eqn.source_info)


def _transpose(linear: Jaxpr, n: int, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
    """Of the linear part of a row; see `Joint.transposed`."""
    eqns: list[JaxprEqn] = []
    sums: dict[Atom, Var] = {}

    def add(tangent: Atom, cotangent: Var) -> None:
        if (known := sums.get(tangent)) is not None:
            total = Var(known.aval)
            with source_info_util.transform_name_stack("transpose"):
                eqns.extend(
                    equations(lambda a, b: [ad.add_jaxvals(a, b)], [known, cotangent], [total])
                )
            cotangent = total
        sums[tangent] = cotangent

    own: dict[Atom, Var] = {v: Var(v.aval) for v in linear.invars[:n]}
    given = [Var(v.aval.to_ct_aval()) for v, z in zip(linear.outvars, zeros, strict=True) if not z]
    ends = (v for v, z in zip(linear.outvars, zeros, strict=True) if not z)
    for v, cotangent in zip(ends, given, strict=True):
        add(v, cotangent)
    for eqn in reversed(linear.eqns):
        none = tuple(v not in sums for v in eqn.outvars)
        if all(none):
            continue
        if eqn.primitive is linear_p:
            halves: Halves = eqn.params["linear"]
            saved, tangents = eqn.invars[: halves.count], eqn.invars[halves.count :]
            program, gone = halves.backward(none)
        else:
            saved, tangents = [], [v for v in eqn.invars if isinstance(v, Var)]
            program, gone = transpose(build(tangents, eqn.outvars, [eqn]), 0, none)
        arriving = [sums[v] for v in eqn.outvars if v in sums]
        made = [Var(t) for t in program.out_avals]
        held = [own.get(v, v) if isinstance(v, Var) else v for v in saved]
        eqns.append(call(program, [*held, *arriving], made))
        reached = (v for v, is_zero in zip(tangents, gone, strict=True) if not is_zero)
        for v, cotangent in zip(reached, made, strict=True):
            add(v, cotangent)
    found = [sums.get(v) for v in linear.invars[n:]]
    outs = [v for v in found if v is not None]
    return build([*own.values(), *given], outs, eqns), tuple(v is None for v in found)
