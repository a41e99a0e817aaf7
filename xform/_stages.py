"""`stages`: cuts a model into stages of a pipeline, at marks or where it is balanced.

A loss is traced to a jaxpr, and its equations are put in a row. What depends on the batch alone, or
on parameters alone, is no work to be divided: each stage makes what it needs of it. What depends on
both is a *unit*; of a scan over layers, each layer is one. A cut between two units sends what is
made before it and read after it. Where to cut is found exactly, by dynamic programming:

    best(s, k) = min over j < k of max(best(s - 1, j), cost(j, k) + link · bytes(k))

the least that the slowest of s stages can take, if they end before unit k; and then, of all cuts
that reach it, those that send the fewest bytes.

Stages need not be alike, and an executor wants arrays of one shape on every rank. So parameters go
into *slots*: arrays with a leading dim for the stages, as many of each shape as the stage with most
of them uses, with zeros where it uses less. A parameter that several stages use is in a slot of
each; `join` adds up its gradients. What travels goes into slots as well, and so does the loss.

Not done: a scan whose results other than its carry are read, or that scans over anything but
parameters or the batch, is not cut inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._compat import JaxprEqn, Literal, Var, jaxpr_as_fun, scan_operands, varying_axes
from xform._cost import cost
from xform.jaxpr._rewrite import bind, inline
from xform.jaxpr._walk import source_line, trace

LINK = 2000.0
"""FLOPs in the time in which one byte is sent, of an H200 in bfloat16 over NVLink."""


@dataclass(frozen=True)
class Unit:
    """What is never cut: an equation, or one turn of a scan.

    Attributes:
      eqn: the equation.
      turn: of a scan over layers, which; else None.
      cost: FLOPs.
    """

    eqn: JaxprEqn
    turn: int | None
    cost: float


@dataclass(frozen=True)
class Piece:
    """What a stage uses of a parameter: all of it, or the layers from `start` to `stop`."""

    leaf: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Row:
    """A stage in a report.

    Attributes:
      cost: FLOPs, forward, of one microbatch.
      sent: bytes that it sends on.
      first, last: the user's lines of its first and last unit, with the layer where there is one.
      parameters: how many numbers it uses.
    """

    cost: float
    sent: int
    first: str
    last: str
    parameters: int


class Stages:
    """A model in stages. It prints as a table.

    Attributes:
      rows: what each stage costs and sends.
      stage: for each stage, `stage(weights, x, batch) -> x`; those that are alike are one function.
      first: `first(shared, batch) -> x`, of zeros: all work is in the stages.
      last: `last(shared, x, batch) -> loss`.
    """

    def __init__(self, program: _Program, cuts: Sequence[int]):
        self._program = program
        bounds = list(zip([0, *cuts], [*cuts, len(program.units)], strict=True))
        self._pieces = [program.pieces(*bound) for bound in bounds]
        self._slots, self._at = _slots(program, self._pieces)
        crossing = [program.crossing(cut) for cut in cuts]
        self._x, self._x_at = _places([[v.aval for v in values] for values in crossing])
        edges = [([], []), *zip(crossing, self._x_at, strict=True), ([], [])]
        made: dict[Any, Callable] = {}
        self.stage: list[Callable] = []
        for s, bound in enumerate(bounds):
            where = [self._at[s][piece] for piece in self._pieces[s]]
            function = _Stage(program, bound, self._pieces[s], where, edges[s], edges[s + 1])
            self.stage.append(made.setdefault(function.key, function))
        self.rows = [
            program.row(*bound, self._pieces[s]) for s, bound in enumerate(bounds)
        ]  # fmt: skip

    def first(self, shared, batch) -> list:
        """What the first stage is given: zeros."""
        del shared
        loss = self._program.jaxpr.out_avals[0]
        return [_vary(jnp.zeros(t.shape, t.dtype), batch) for t in (loss, *self._x)]

    def last(self, shared, x: Sequence, batch):
        """The share in the loss: what devices with other rows found, added up."""
        del shared
        axes = tuple(sorted(varying_axes(x[0]) & _axes(batch, but={"pp"})))
        return lax.psum(x[0], axes) if axes else x[0]

    def split(self, params) -> list:
        """Returns the weights of all stages: for each slot an array with a leading dim for them.

        Args:
          params: the parameters, as they were traced.
        """
        leaves = jax.tree.leaves(params)
        count, weights = len(self.stage), []
        for i, slot in enumerate(self._slots):
            rows = [jnp.zeros(slot.shape, slot.dtype)] * count
            for s, at in enumerate(self._at):
                for piece, where in at.items():
                    if where == i:
                        rows[s] = _padded(_part(leaves[piece.leaf], piece), slot)
            weights.append(jnp.stack(rows))
        return weights

    def join(self, weights: Sequence) -> Any:
        """Returns a tree as that of the parameters from gradients of `split`'s result, added up.

        Of parameters that have no gradient there is None, as in what executors return.
        """
        program = self._program
        leaves: list[Any] = [
            jnp.zeros(t.shape, jnp.promote_types(t.dtype, jnp.float32))
            if jnp.issubdtype(t.dtype, jnp.inexact) else None
            for t in program.params
        ]  # fmt: skip
        for s, at in enumerate(self._at):
            for piece, where in at.items():
                if leaves[piece.leaf] is None or weights[where] is None:
                    continue
                mine = weights[where][s]
                if piece.start is None:
                    leaves[piece.leaf] = leaves[piece.leaf] + mine
                else:
                    there = leaves[piece.leaf].at[piece.start : piece.stop]
                    leaves[piece.leaf] = there.add(mine[: piece.stop - piece.start])
        return jax.tree.unflatten(program.params_tree, leaves)

    @property
    def tied(self) -> list[str]:
        """The parameters that several stages use."""
        seen = Counter(piece for pieces in self._pieces for piece in pieces)
        names = {self._program.names[p.leaf] for p, n in seen.items() if n > 1}
        return sorted(names)

    def __str__(self):
        total = sum(row.cost for row in self.rows) or 1.0
        lines = [
            f"stage {s}: {row.cost / total:6.1%} of {total:.3g} FLOPs, {row.parameters:,} "
            f"parameters, sends {row.sent:,} bytes: {row.first} … {row.last}"
            for s, row in enumerate(self.rows)
        ]
        return "\n".join([*lines, *[f"used by several: {', '.join(self.tied)}"] * bool(self.tied)])

    __repr__ = __str__


def stages(
    f: Callable, count: int | None = None, *, at: str | None = None, link: float = LINK
) -> Callable[..., Stages]:
    """Returns a function that cuts a model into the stages of a pipeline.

    Args:
      f: `f(params, batch) -> loss`, of one microbatch; the losses of microbatches are added up. It
        is called as on one device.
      count: how many stages, of which the dearest is made as cheap as can be.
      at: instead, cuts after each `jax.ad_checkpoint.checkpoint_name(x, at)` of this name.
      link: how many FLOPs a byte costs that is sent.

    Returns:
      A function of the arguments of `f`, or of their types, that returns `Stages`: what
      `xform.sharding.pipeline`'s executors take.

    Raises:
      ValueError: from it, where there are fewer places to cut than wanted, or no such mark, or one
        inside a loop; or `f` returns anything but a number.

    >>> def loss(params, batch):
    ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
    ...     return jnp.sum(jax.lax.scan(layer, batch @ params["in"], params["layers"])[0])
    >>> params = {"in": jnp.ones((4, 8)), "layers": jnp.ones((6, 8, 8))}
    >>> cut = stages(loss, 3)(params, jnp.ones((2, 4)))
    >>> [weights.shape for weights in cut.split(params)]
    [(3, 4, 8), (3, 2, 8, 8)]
    """
    if (count is None) == (at is None):
        raise ValueError("`stages` needs a number of stages or `at=`, the name of marks; not both.")

    def cut(params, batch) -> Stages:
        program = _Program(f, params, batch)
        return Stages(program, program.marks(at) if at else program.balanced(count or 0, link))

    return cut


# ---- the program as a row of units ---------------------------------------------------------------


class _Program:
    """A loss as units, and what each equation reads.

    Attributes:
      jaxpr: the program.
      params: types of the parameters' leaves; `names` and `params_tree` go with them.
      units: in order.
    """

    def __init__(self, f: Callable, params, batch):
        self.jaxpr = inline(trace(f, params, batch))
        if [t.shape for t in self.jaxpr.out_avals] != [()]:
            raise ValueError(
                "`stages` cuts a loss: a function that returns one number; found "
                f"{', '.join(t.str_short() for t in self.jaxpr.out_avals)}."
            )
        flat, self.params_tree = jax.tree.flatten_with_path(params)
        self.names = [jax.tree_util.keystr(path) for path, _ in flat]
        self.param_vars = self.jaxpr.invars[: len(flat)]
        self.batch_vars = self.jaxpr.invars[len(flat) :]
        self.params = [v.aval for v in self.param_vars]
        self.leaf = {v: i for i, v in enumerate(self.param_vars)}
        self._sort()
        if not self.units:
            raise ValueError("`stages` found nothing that depends on both parameters and batch.")

    def _sort(self) -> None:
        """Tells what moves, depending on both, from what each stage makes for itself."""
        of_params, of_batch = {*self.param_vars}, {*self.batch_vars}
        self.units: list[Unit] = []
        self.maker: dict[Var, JaxprEqn] = {}
        self.moving: set[Var] = set()
        for eqn in self.jaxpr.eqns:
            reads = {*_names(eqn.invars)}
            a, b = bool(reads & of_params), bool(reads & of_batch)
            of_params.update(eqn.outvars if a else ())
            of_batch.update(eqn.outvars if b else ())
            self.maker.update(dict.fromkeys(eqn.outvars, eqn))
            if (a and b) or eqn.effects:
                self.moving.update(eqn.outvars)
                self.units += self._units(eqn, of_batch)

    def _units(self, eqn: JaxprEqn, of_batch: set[Var]) -> list[Unit]:
        price = cost(lambda *args: bind(eqn, *args), strict=False)
        total = float(price(*(v.aval for v in eqn.invars)).total.flops)
        if not self._layered(eqn, of_batch):
            return [Unit(eqn, None, total)]
        length = eqn.params["length"]
        return [Unit(eqn, turn, total / length) for turn in range(length)]

    def _layered(self, eqn: JaxprEqn, of_batch: set[Var]) -> bool:
        """Whether a scan can be cut: it goes over parameters, and leaves its carry alone."""
        if eqn.primitive.name != "scan" or eqn.params["reverse"] or eqn.params["length"] < 2:
            return False
        consts, carry = scan_operands(eqn)
        xs = [v for v in eqn.invars[consts + carry :] if isinstance(v, Var)]
        read = {v for e in self.jaxpr.eqns for v in _names(e.invars)} | {*self.jaxpr.outvars}
        own = all(v in self.leaf or (v in of_batch and not self._of_params(v)) for v in xs)
        return own and bool(self.leaf.keys() & {*xs}) and not read & {*eqn.outvars[carry:]}

    def _of_params(self, v: Var) -> bool:
        return v in self.moving

    def crossing(self, cut: int) -> list[Var]:
        """What is made before a cut and read after it."""
        before, after = self.units[:cut], self.units[cut:]
        made = {v for unit in before for v in unit.eqn.outvars}
        reads = [v for unit in after for v in self._reads(unit)] + [*self.jaxpr.outvars]
        inside = before and after and before[-1].eqn is after[0].eqn
        if inside:  # what the scan carries takes the place of what it began with
            eqn = after[0].eqn
            consts, carry = scan_operands(eqn)
            kept = [v for unit in after if unit.eqn is not eqn for v in self._reads(unit)]
            reads = [*kept, *_names(eqn.invars[:consts]), *self.jaxpr.outvars]
            made -= {*eqn.outvars}
            cross = dict.fromkeys(v for v in reads if v in made)
            return [*eqn.outvars[:carry], *cross]
        return [*dict.fromkeys(v for v in reads if v in made)]

    def _reads(self, unit: Unit) -> list[Var]:
        """What moves that a unit reads, by itself or through what its stage makes for itself."""
        return [v for v in _names(unit.eqn.invars) if v in self.moving]

    def free(self, wanted: Sequence[Var]) -> list[JaxprEqn]:
        """The equations that make what does not move and is wanted, in order."""
        need, todo = set(), [*wanted]
        while todo:
            eqn = self.maker.get(todo.pop())
            if eqn is not None and id(eqn) not in need and eqn.outvars[0] not in self.moving:
                need.add(id(eqn))
                todo += _names(eqn.invars)
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in need]

    def balanced(self, count: int, link: float) -> list[int]:
        """The best cuts."""
        costs = np.cumsum([0.0, *(unit.cost for unit in self.units)])
        sent = np.array([0.0, *map(self._sent, range(1, len(self.units))), 0.0])
        places = int(np.isfinite(sent[1:-1]).sum())
        if not 1 <= count <= places + 1:
            raise ValueError(
                f"`stages(f, {count})`: this model can be cut at {places} places, into 1 to "
                f"{places + 1} stages."
            )
        return _cut(costs, sent, count, link)

    def _sent(self, cut: int) -> float:
        """The bytes of a cut; infinite where something would have to travel that is no float."""
        types = [v.aval for v in self.crossing(cut)]
        if not all(jnp.issubdtype(t.dtype, jnp.inexact) for t in types):
            return np.inf
        return float(sum(t.size * t.dtype.itemsize for t in types))

    def marks(self, name: str) -> list[int]:
        """The cuts at marks."""
        is_mark = lambda eqn: eqn.primitive.name == "name" and eqn.params["name"] == name
        found = [i + 1 for i, unit in enumerate(self.units) if is_mark(unit.eqn)]
        if not found:
            raise ValueError(
                f"`stages(f, at={name!r})` found no `checkpoint_name(x, {name!r})` at the top of "
                "the program. Inside of a loop a mark is of every turn: unroll it, or give a "
                "number of stages."
            )
        bad = [i for i in found if not np.isfinite(self._sent(i))]
        if bad or found[-1] == len(self.units):
            lines = ", ".join(source_line(self.units[i - 1].eqn) for i in bad or found[-1:])
            raise ValueError(
                f"`stages(f, at={name!r})` can't cut at {lines}: something that is no float would "
                "have to be sent, or nothing comes after it."
            )
        return found

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What the units use of the parameters."""
        found: dict[Piece, None] = {}
        turns: dict[int, list[int]] = {}
        for unit in self.units[start:stop]:
            if unit.turn is None:
                wanted = _names(unit.eqn.invars)
            else:
                consts, carry = scan_operands(unit.eqn)
                wanted = _names(unit.eqn.invars[: consts + carry])
                turns.setdefault(id(unit.eqn), []).append(unit.turn)
            for eqn in self.free(wanted):
                wanted = [*wanted, *_names(eqn.invars)]
            found |= dict.fromkeys(Piece(self.leaf[v]) for v in wanted if v in self.leaf)
        for unit in self.units[start:stop]:
            if unit.turn is not None and (own := turns.pop(id(unit.eqn), None)):
                consts, carry = scan_operands(unit.eqn)
                for v in _names(unit.eqn.invars[consts + carry :]):
                    if v in self.leaf:
                        found[Piece(self.leaf[v], own[0], own[-1] + 1)] = None
        return [*found]

    def row(self, start: int, stop: int, pieces: Sequence[Piece]) -> Row:
        """What is said of a stage."""
        units = self.units[start:stop]
        size = lambda p: self.params[p.leaf].size * _share(self.params[p.leaf], p)
        line = lambda u: source_line(u.eqn) + ("" if u.turn is None else f" (layer {u.turn})")
        sent = self._sent(stop) if stop < len(self.units) else 0
        parameters = int(sum(map(size, pieces)))
        cost = sum(unit.cost for unit in units)
        return Row(cost, int(sent), line(units[0]), line(units[-1]), parameters)


def _cut(costs: np.ndarray, sent: np.ndarray, count: int, link: float) -> list[int]:
    """The exact optimum: the least slowest stage, and of those the fewest bytes sent."""
    n = len(costs) - 1
    ends = costs + link * sent
    take = ends[None] - costs[:, None]  # of a stage from unit j up to unit k
    take[np.tril_indices(n + 1)] = np.inf
    best = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    for _ in range(count):
        best = np.min(np.maximum(best[:, None], take), 0)
    fits = take <= best[n] * (1 + 1e-12)
    total, chosen = np.where(np.arange(n + 1) == 0, 0.0, np.inf), []
    for _ in range(count):
        through = np.where(fits, total[:, None] + sent[None], np.inf)
        chosen.append(np.argmin(through, 0))
        total = np.min(through, 0)
    cuts, k = [], n
    for from_ in reversed(chosen):
        k = int(from_[k])
        cuts.append(k)
    return cuts[-2::-1]


# ---- slots ---------------------------------------------------------------------------------------


def _part(leaf, piece: Piece):
    return leaf if piece.start is None else leaf[piece.start : piece.stop]


def _share(leaf, piece: Piece) -> float:
    return 1.0 if piece.start is None else (piece.stop - piece.start) / leaf.shape[0]


def _padded(part, slot):
    """A part with zeros behind it, to the length of its slot."""
    short = slot.shape[0] - part.shape[0] if slot.ndim else 0
    return jnp.pad(part, [(0, short), *[(0, 0)] * (part.ndim - 1)]) if short else part


def _slots(program: _Program, pieces: Sequence[Sequence[Piece]]):
    """Types of slots for parameters, and for each stage which slot each piece has."""
    longest: Counter = Counter()
    for piece in (p for of_stage in pieces for p in of_stage if p.start is not None):
        leaf = program.params[piece.leaf]
        key = leaf.shape[1:], leaf.dtype
        longest[key] = max(longest[key], piece.stop - piece.start)

    def type_of(piece: Piece):
        leaf = program.params[piece.leaf]
        if piece.start is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        length = longest[leaf.shape[1:], leaf.dtype]
        return jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype)

    slots, places = _places([[type_of(piece) for piece in of_stage] for of_stage in pieces])
    at = [dict(zip(of, place, strict=True)) for of, place in zip(pieces, places, strict=True)]
    return slots, at


def _places(types: Sequence[Sequence]) -> tuple[list, list[list[int]]]:
    """As many slots of each type as the longest need, and which slot each has."""
    slots: list[Any] = []
    found, by_type = [], {}
    for row in types:
        used: Counter = Counter()
        at = []
        for t in row:
            key = t.shape, str(t.dtype)
            mine = by_type.setdefault(key, [])
            if used[key] == len(mine):
                mine.append(len(slots))
                slots.append(t)
            at.append(mine[used[key]])
            used[key] += 1
        found.append(at)
    return slots, found


# ---- a stage -------------------------------------------------------------------------------------


class _Stage:
    """A stage as a function of its weights, of what travels, and of the batch.

    Attributes:
      key: what it does; stages of one key are the same function.
    """

    def __init__(self, program: _Program, bound: tuple[int, int], pieces, slots, before, after):
        self.program, self.units = program, program.units[slice(*bound)]
        self.pieces, self.slots, self.before, self.after = pieces, slots, before, after
        self.is_last = bound[1] == len(program.units)
        wanted = [v for unit in self.units for v in _names(unit.eqn.invars)]
        wanted += _names(program.jaxpr.outvars) if self.is_last else []
        self.free = program.free(wanted)
        runs = Counter(id(unit.eqn) for unit in self.units)
        whole = [unit.turn is None for unit in self.units]
        # Layers of one scan are alike, wherever they begin; so are stages of as many of them.
        lengths = tuple((p.leaf, (p.stop or 0) - (p.start or 0)) for p in pieces)
        batch_slices = self._first_turn() if self._scans_batch() else None
        self.key = (
            tuple(runs.items()), any(whole), lengths, tuple(slots), self.is_last,
            tuple(map(id, before[0])), tuple(before[1]), tuple(map(id, after[0])), tuple(after[1]),
            batch_slices,
        )  # fmt: skip

    def _first_turn(self) -> int:
        return next((unit.turn for unit in self.units if unit.turn is not None), 0)

    def _scans_batch(self) -> bool:
        """Whether a scan goes over something that is no parameter, so that it matters where."""
        for unit in self.units:
            if unit.turn is not None:
                consts, carry = scan_operands(unit.eqn)
                xs = _names(unit.eqn.invars[consts + carry :])
                return any(v not in self.program.leaf for v in xs)
        return False

    def __call__(self, weights: Sequence, x: Sequence, batch) -> list:
        """What travels, after this stage."""
        program, env = self.program, {}
        env.update(zip(program.jaxpr.constvars, program.jaxpr.consts, strict=True))
        env.update(zip(program.batch_vars, jax.tree.leaves(batch), strict=True))
        layers: dict[int, Any] = {}
        for piece, slot in zip(self.pieces, self.slots, strict=True):
            if piece.start is None:
                env[program.param_vars[piece.leaf]] = weights[slot]
            else:
                layers[piece.leaf] = weights[slot][: piece.stop - piece.start]
        env.update(zip(self.before[0], (x[1 + i] for i in self.before[1]), strict=True))
        for eqn in self.free:
            _run(eqn, env)
        self._run(env, layers)
        out = [jnp.zeros(v.shape, v.dtype) for v in x]
        if self.is_last:
            out[0] = _value(program.jaxpr.outvars[0], env)
        for v, i in zip(self.after[0], self.after[1], strict=True):
            out[1 + i] = env[v]
        return [_vary(v, batch) for v in out]

    def _run(self, env: dict, layers: dict[int, Any]) -> None:
        units = [*self.units]
        while units:
            eqn = units[0].eqn
            turns = [unit.turn for unit in units if unit.eqn is eqn]
            del units[: len(turns)]
            if turns[0] is None:
                _run(eqn, env)
            else:
                self._scan(eqn, turns, env, layers)

    def _scan(self, eqn: JaxprEqn, turns: Sequence[int], env: dict, layers: dict) -> None:
        """Some turns of a scan, whose carry begins where the stage before left it."""
        consts, carry = scan_operands(eqn)
        body = jaxpr_as_fun(eqn.params["jaxpr"])
        fixed = [_value(v, env) for v in eqn.invars[:consts]]
        begins = eqn.invars[consts : consts + carry] if turns[0] == 0 else eqn.outvars[:carry]
        leaf = self.program.leaf
        xs = [
            layers[leaf[v]] if v in leaf else _value(v, env)[turns[0] : turns[-1] + 1]
            for v in eqn.invars[consts + carry :]
        ]
        turn = lambda now, x: (body(*fixed, *now, *x)[:carry], None)
        now = _settled(turn, [_value(v, env) for v in begins], xs)
        env.update(zip(eqn.outvars[:carry], lax.scan(turn, now, xs)[0], strict=True))


def _settled(turn: Callable, now: list, xs: list) -> list:
    """What a scan begins with, varying over the mesh axes that what it carries does."""
    one = [x[0] for x in xs]
    while True:
        out = jax.make_jaxpr(lambda now: turn(now, one)[0])(now).out_avals
        pairs = list(zip(now, out, strict=True))
        if all(varying_axes(t) <= varying_axes(v) for v, t in pairs):
            return now
        now = [_cast(v, varying_axes(t)) for v, t in pairs]


def _run(eqn: JaxprEqn, env: dict) -> None:
    env.update(zip(eqn.outvars, bind(eqn, *(_value(v, env) for v in eqn.invars)), strict=True))


def _value(atom: Any, env: dict) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _names(atoms: Sequence) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var)]


def _axes(*trees, but: frozenset[str] | set[str] = frozenset()) -> frozenset[str]:
    """The mesh axes over which some leaf differs."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(trees))) - but


def _vary(x, batch):
    """A value that differs over the axes that the batch does, as all that travels has to."""
    return _cast(x, _axes(batch))


def _cast(x, axes: frozenset[str]):
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
