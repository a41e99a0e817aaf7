"""A program cut in two by what is asked for first: the head makes it, the tail makes the rest.

The head is what can be reached, backwards, from the results that are wanted first. What it makes
on the way and the tail reads crosses over, unless it does not vary: what depends on fixed inputs
alone (weights, say) is made again. A scan that has parts of both is cut into two scans, its body by
the same rule: what crosses over in it is stacked up, one slice for each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, scan_operands
from xform.jaxpr._rewrite import bind


class Slot:
    """Something that a program makes and no equation names, such as a stack of what crosses over.

    Attributes:
      aval: its type; of one slice of it, if it is stacked by a scan.
      eqn: what made it.
    """

    def __init__(self, aval, eqn: JaxprEqn | None):
        self.aval = aval
        self.eqn = eqn


type Name = Var | Slot


@dataclass(frozen=True, eq=False)
class Node:
    """An equation, or one half of a scan.

    Attributes:
      ins, outs: what it reads and makes.
      run: makes the results from the operands.
      eqn: the equation.
      eqns: the equations that it runs, of a scan those of its body.
    """

    ins: tuple[Any, ...]
    outs: tuple[Name, ...]
    run: Callable[..., Sequence]
    eqn: JaxprEqn
    eqns: tuple[JaxprEqn, ...]


@dataclass(frozen=True)
class Division:
    """A program in two parts.

    Attributes:
      head: what makes the results that are wanted first.
      tail: what makes the others, given what crosses over.
      crossing: what the head makes and the tail reads, or gives back as it is.
    """

    head: tuple[Node, ...]
    tail: tuple[Node, ...]
    crossing: tuple[Name, ...]


def divide(
    jaxpr: Jaxpr,
    first: Sequence[Any],
    others: Sequence[Any],
    varies: Sequence[bool],
    carried: Iterable[Var] = (),
    *,
    effects: bool = False,
) -> Division:
    """Cuts a program in two.

    Args:
      jaxpr: a program whose calls have been inlined.
      first: what is wanted first, named as in the program.
      others: what is wanted beside.
      varies: for each input, whether it is another one in each run; what does not depend on such
        is made again rather than carried over.
      carried: inputs that only the head has.
      effects: whether the head also does what has an effect, such as printing.
    """
    moving = moving_names(jaxpr, varies)
    need = {*filter(is_name, first)}
    head, rest = [], []
    for eqn in reversed(jaxpr.eqns):
        hit = [v in need for v in eqn.outvars]
        if not any(hit) and not (effects and eqn.effects):
            rest.append(_node(eqn))
            continue
        node = _node(eqn)
        if eqn.primitive.name == "scan" and not all(hit):
            node, other = _divide_scan(
                eqn, hit, [is_name(v) and v in moving for v in eqn.invars], effects=effects
            )
            moving |= {v for v in node.outs if isinstance(v, Slot)}
            rest.append(other)
        head.append(node)
        need.update(filter(is_name, node.ins))
    head, rest = head[::-1], rest[::-1]
    made = {v for node in head for v in node.outs if v in moving} | {*carried}
    still = [node for node in head if not made.intersection(node.outs)]
    need = {*filter(is_name, others)}
    tail = []
    for node in reversed(still + rest):
        if need.intersection(node.outs):
            tail.append(node)
            need.update(v for v in node.ins if is_name(v) and v not in made)
    reads = [*others, *(v for node in reversed(tail) for v in node.ins)]
    crossing = dict.fromkeys(v for v in reads if is_name(v) and v in made)
    return Division(tuple(head), tuple(tail[::-1]), tuple(crossing))


def run(nodes: Sequence[Node], env: dict[Any, Any]) -> None:
    """Runs the nodes; `env` has what they read, and gets what they make."""
    for node in nodes:
        env.update(zip(node.outs, node.run(*(read(v, env) for v in node.ins)), strict=True))


def read(atom: Any, env: dict[Any, Any]) -> Any:
    """The value of a literal, or of what has a name."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def inputs(jaxpr: Jaxpr, args: Sequence) -> dict[Any, Any]:
    """The inputs of a program and its constants by name."""
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))


def is_name(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _node(eqn: JaxprEqn) -> Node:
    body = eqn.params["jaxpr"].eqns if eqn.primitive.name == "scan" else (eqn,)
    return Node(
        tuple(eqn.invars), tuple(eqn.outvars), lambda *args: bind(eqn, *args), eqn, tuple(body)
    )


def moving_names(jaxpr: Jaxpr, varies: Sequence[bool]) -> set[Any]:
    """What depends on inputs that vary."""
    moving: set[Any] = {v for v, moves in zip(jaxpr.invars, varies, strict=True) if moves}
    for eqn in jaxpr.eqns:
        flags = [is_name(v) and v in moving for v in eqn.invars]
        if eqn.primitive.name == "scan":
            out, _ = _scanmoving_names(eqn, flags)
        else:
            # To ask where a device is has an effect in JAX, and gives the same each time.
            again = not eqn.effects or eqn.primitive.name == "axis_index"
            out = [any(flags) or not again] * len(eqn.outvars)
        moving |= {v for v, moves in zip(eqn.outvars, out, strict=True) if moves}
    return moving


def _scanmoving_names(eqn: JaxprEqn, flags: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which results of a scan vary, and which inputs of its body do."""
    body, (consts, carry) = eqn.params["jaxpr"], scan_operands(eqn)
    flags = list(flags)
    while True:
        moving = moving_names(body, flags)
        out = [is_name(v) and v in moving for v in body.outvars]
        after = [a or b for a, b in zip(flags[consts : consts + carry], out[:carry], strict=True)]
        if after == flags[consts : consts + carry]:
            return out, flags
        flags[consts : consts + carry] = after


def _divide_scan(
    eqn: JaxprEqn, hit: Sequence[bool], flags: Sequence[bool], *, effects: bool
) -> tuple[Node, Node]:
    """A scan as two: the first makes the results that are hit, the second the others."""
    body, (consts, carry) = eqn.params["jaxpr"], scan_operands(eqn)
    _, varies = _scanmoving_names(eqn, flags)
    first = list(hit)
    carry_in = body.invars[consts : consts + carry]
    while True:  # a carried value that the head reads has to be carried by the head
        carried = [v for v, wanted in zip(carry_in, first, strict=False) if wanted]
        wanted_first = [v for v, wanted in zip(body.outvars, first, strict=True) if wanted]
        others = [v for v, wanted in zip(body.outvars, first, strict=True) if not wanted]
        parts = divide(body, wanted_first, others, varies, carried, effects=effects)
        reads = {v for node in parts.head for v in node.ins if is_name(v)}
        reads |= {*filter(is_name, wanted_first)}
        grown = [first[i] or v in reads for i, v in enumerate(carry_in)]
        if grown == first[:carry]:
            break
        first[:carry] = grown
    stacks = tuple(Slot(getattr(v, "aval", None), _maker(parts.head, v)) for v in parts.crossing)
    mine = [i for i, wanted in enumerate(first) if wanted]
    others = [i for i, wanted in enumerate(first) if not wanted]
    head = _half(eqn, parts.head, mine, extra_out=dict(zip(parts.crossing, stacks, strict=True)))
    tail = _half(eqn, parts.tail, others, extra_in=dict(zip(parts.crossing, stacks, strict=True)))
    return head, tail


def _maker(nodes: Sequence[Node], name: Name) -> JaxprEqn | None:
    return next((node.eqn for node in nodes if name in node.outs), None)


def _half(
    eqn: JaxprEqn,
    nodes: Sequence[Node],
    outs: Sequence[int],
    *,
    extra_in: dict[Any, Slot] | None = None,
    extra_out: dict[Any, Slot] | None = None,
) -> Node:
    """A scan of some of the results `outs`, that also reads or makes stacks of what crosses."""
    extra_in, extra_out = extra_in or {}, extra_out or {}
    body, (consts, carry) = eqn.params["jaxpr"], scan_operands(eqn)
    carries = [i for i in outs if i < carry]
    ys = [i for i in outs if i >= carry]
    used = {v for node in nodes for v in node.ins if is_name(v)}
    used |= {body.outvars[i] for i in outs if is_name(body.outvars[i])} | {*extra_out}
    fixed = [i for i in range(consts) if body.invars[i] in used]
    scanned = [i for i in range(consts + carry, len(body.invars)) if body.invars[i] in used]

    def run_half(*args):
        n, m = len(fixed), len(fixed) + len(carries)
        env = inputs(body, [None] * len(body.invars))
        env.update(zip((body.invars[i] for i in fixed), args[:n], strict=True))

        def turn(now, xs):
            mine = dict(env)
            mine.update(zip((body.invars[consts + i] for i in carries), now, strict=True))
            names = [*(body.invars[i] for i in scanned), *extra_in]
            mine.update(zip(names, xs, strict=True))
            run(nodes, mine)
            made = [read(body.outvars[i], mine) for i in ys] + [mine[v] for v in extra_out]
            return [read(body.outvars[i], mine) for i in carries], made

        kept = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        last, made = lax.scan(turn, list(args[n:m]), list(args[m:]), **kept)
        return [*last, *made]

    operands = [*fixed, *(consts + i for i in carries), *scanned]
    return Node(
        (*(eqn.invars[i] for i in operands), *extra_in.values()),
        (*(eqn.outvars[i] for i in (*carries, *ys)), *extra_out.values()),
        run_half,
        eqn,
        tuple(e for node in nodes for e in node.eqns),
    )
