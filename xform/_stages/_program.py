"""A loss as a row of units, what may be sent between them, and where it is best cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from xform._compat import JaxprEqn, Literal, Var, scan_operands, varying_axes
from xform._cost import cost
from xform._stages._vary import axes_of, cast
from xform.jaxpr._rewrite import bind, inline
from xform.jaxpr._trace import trace
from xform.jaxpr._walk import given_name, source_line

# What tells JAX that a value differs over devices: nothing to compute.
_CASTS = ("pvary", "pcast")


@dataclass(frozen=True)
class Unit:
    """What is never cut: an equation, or one turn of a scan.

    Attributes:
      eqn: the equation.
      turn: of a scan over layers, which; -1 of anything else.
      cost: FLOPs.
    """

    eqn: JaxprEqn
    turn: int
    cost: float


@dataclass(frozen=True)
class Piece:
    """What a stage uses of a parameter: all of it, or the layers from `start` to `stop`."""

    leaf: int
    start: int = 0
    stop: int = 0

    @property
    def layered(self) -> bool:
        """Whether it is some layers."""
        return self.stop > 0

    def size(self, leaf) -> int:
        """How many numbers it is of a parameter."""
        return leaf.size // leaf.shape[0] * (self.stop - self.start) if self.layered else leaf.size


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


class Program:
    """A loss as units, and what each equation reads.

    Attributes:
      f: the loss.
      jaxpr: its program.
      params: types of the parameters' leaves; `names` and `params_tree` go with them.
      units: in order.
    """

    def __init__(self, f: Callable, params, batch, *, priced: bool = True):
        whole = inline(trace(f, params, batch))
        # What nothing reads is no work.
        self.jaxpr, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars), instantiate=True)
        self.f, self._priced = f, priced
        found: list[Any] = list(self.jaxpr.out_avals)
        if [t.shape for t in found] != [()]:
            raise ValueError(
                "`stages` cuts a loss: a function that returns one number; found "
                f"{', '.join(t.str_short() for t in found)}."
            )
        flat, self.params_tree = jax.tree.flatten_with_path(params)
        self.names = [jax.tree_util.keystr(path) for path, _ in flat]
        self.param_vars = self.jaxpr.invars[: len(flat)]
        self.batch_vars = self.jaxpr.invars[len(flat) :]
        self.params: list[Any] = [v.aval for v in self.param_vars]
        self.leaf = {v: i for i, v in enumerate(self.param_vars)}
        self._sort()
        if not self.units:
            raise ValueError("`stages` found nothing that depends on both parameters and batch.")

    def here(self, batch) -> Program:
        """The same loss traced again where it runs: with its rows, and with types of devices."""
        zeros = [cast(jnp.zeros(t.shape, t.dtype), axes_of(batch)) for t in self.params]
        params = jax.tree.unflatten(self.params_tree, zeros)
        here = Program(self.f, params, batch, priced=False)
        what = lambda units: [(unit.eqn.primitive.name, unit.turn) for unit in units]
        if what(here.units) != what(self.units):
            raise ValueError(
                "a loss that `stages` has cut is another program where it runs: it must not depend "
                "on the size of the batch but in shapes. Cut it for what a device has of one."
            )
        return here

    def _sort(self) -> None:
        """Tells what moves, depending on both, from what each stage makes for itself."""
        of_params, of_batch = {*self.param_vars}, {*self.batch_vars}
        self.units: list[Unit] = []
        self.maker: dict[Var, JaxprEqn] = {}
        self.moving: set[Var] = set()
        self._cast_of: dict[Var, Var] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in _CASTS and isinstance(eqn.invars[0], Var):
                self._cast_of[eqn.outvars[0]] = eqn.invars[0]
                continue
            reads = {*self.names_in(eqn.invars)}
            a, b = bool(reads & of_params), bool(reads & of_batch)
            of_params.update(eqn.outvars if a else ())
            of_batch.update(eqn.outvars if b else ())
            self.maker.update(dict.fromkeys(eqn.outvars, eqn))
            if (a and b) or eqn.effects:
                self.moving.update(eqn.outvars)
                self.units += self._units(eqn, of_batch)

    def root(self, v: Var) -> Var:
        """What a name is, seen without the casts that JAX's types of devices ask for."""
        while v in self._cast_of:
            v = self._cast_of[v]
        return v

    def names_in(self, atoms: Sequence) -> list[Var]:
        """What is read, without casts."""
        return [self.root(v) for v in atoms if isinstance(v, Var)]

    def value(self, atom: Any, env: dict) -> Any:
        """The value of something read, cast as the program has it."""
        if isinstance(atom, Literal):
            return atom.val
        return cast(env[self.root(atom)], varying_axes(atom.aval))

    def run(self, eqn: JaxprEqn, env: dict) -> None:
        """Adds what an equation makes."""
        values = (self.value(v, env) for v in eqn.invars)
        env.update(zip(eqn.outvars, bind(eqn, *values), strict=True))

    def _units(self, eqn: JaxprEqn, of_batch: set[Var]) -> list[Unit]:
        total = 0.0
        if self._priced:
            price = cost(lambda *args: bind(eqn, *args), strict=False)
            total = float(price(*(v.aval for v in eqn.invars)).total.flops)
        if not self._layered(eqn, of_batch):
            return [Unit(eqn, -1, total)]
        length = eqn.params["length"]
        return [Unit(eqn, turn, total / length) for turn in range(length)]

    def _layered(self, eqn: JaxprEqn, of_batch: set[Var]) -> bool:
        """Whether a scan can be cut: it goes over parameters, and leaves its carry alone."""
        if eqn.primitive.name != "scan" or eqn.params["reverse"] or eqn.params["length"] < 2:
            return False
        consts, carry = scan_operands(eqn)
        xs = self.names_in(eqn.invars[consts + carry :])
        read = {v for e in self.jaxpr.eqns for v in e.invars if isinstance(v, Var)}
        read |= {v for v in self.jaxpr.outvars if isinstance(v, Var)}
        own = all(v in self.leaf or (v in of_batch and v not in self.moving) for v in xs)
        return own and bool(self.leaf.keys() & {*xs}) and not read & {*eqn.outvars[carry:]}

    def crossing(self, cut: int) -> list[Var]:
        """What is made before a cut and read after it."""
        before, after = self.units[:cut], self.units[cut:]
        made = {v for unit in before for v in unit.eqn.outvars}
        ends = self.names_in(self.jaxpr.outvars)
        reads = [*(v for unit in after for v in self._reads(unit)), *ends]
        inside = before and after and before[-1].eqn is after[0].eqn
        if inside:  # what the scan carries takes the place of what it began with
            eqn = after[0].eqn
            consts, carry = scan_operands(eqn)
            kept = [v for unit in after if unit.eqn is not eqn for v in self._reads(unit)]
            reads = [*kept, *self.names_in(eqn.invars[:consts]), *ends]
            made -= {*eqn.outvars}
            cross = dict.fromkeys(v for v in reads if v in made)
            return [*eqn.outvars[:carry], *cross]
        return [*dict.fromkeys(v for v in reads if v in made)]

    def _reads(self, unit: Unit) -> list[Var]:
        """What moves that a unit reads, by itself or through what its stage makes for itself."""
        return [v for v in self.names_in(unit.eqn.invars) if v in self.moving]

    def free(self, wanted: Sequence[Var]) -> list[JaxprEqn]:
        """The equations that make what does not move and is wanted, in order."""
        need, todo = set(), [*wanted]
        while todo:
            eqn = self.maker.get(todo.pop())
            if eqn is not None and id(eqn) not in need and eqn.outvars[0] not in self.moving:
                need.add(id(eqn))
                todo += self.names_in(eqn.invars)
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
        return best_cuts(costs, sent, count, link)

    def _sent(self, cut: int) -> float:
        """The bytes of a cut; infinite where something would have to travel that is no float."""
        types: list[Any] = [v.aval for v in self.crossing(cut)]
        if not all(jnp.issubdtype(t.dtype, jnp.inexact) for t in types):
            return np.inf
        return float(sum(t.size * t.dtype.itemsize for t in types))

    def marks(self, name: str) -> list[int]:
        """The cuts at marks."""
        found = [i + 1 for i, unit in enumerate(self.units) if given_name(unit.eqn) == name]
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
            if unit.turn < 0:
                wanted = self.names_in(unit.eqn.invars)
            else:
                consts, carry = scan_operands(unit.eqn)
                wanted = self.names_in(unit.eqn.invars[: consts + carry])
                turns.setdefault(id(unit.eqn), []).append(unit.turn)
            for eqn in self.free(wanted):
                wanted = [*wanted, *self.names_in(eqn.invars)]
            found |= dict.fromkeys(Piece(self.leaf[v]) for v in wanted if v in self.leaf)
        for unit in self.units[start:stop]:
            if unit.turn >= 0 and (own := turns.pop(id(unit.eqn), None)):
                consts, carry = scan_operands(unit.eqn)
                for v in self.names_in(unit.eqn.invars[consts + carry :]):
                    if v in self.leaf:
                        found[Piece(self.leaf[v], own[0], own[-1] + 1)] = None
        return [*found]

    def row(self, start: int, stop: int, pieces: Sequence[Piece]) -> Row:
        """What is said of a stage."""
        units = self.units[start:stop]
        line = lambda u: source_line(u.eqn) + ("" if u.turn < 0 else f" (layer {u.turn})")
        sent = self._sent(stop) if stop < len(self.units) else 0
        parameters = sum(piece.size(self.params[piece.leaf]) for piece in pieces)
        cost = sum(unit.cost for unit in units)
        return Row(cost, int(sent), line(units[0]), line(units[-1]), parameters)


def best_cuts(costs: np.ndarray, sent: np.ndarray, count: int, link: float) -> list[int]:
    """The exact optimum: the least slowest stage, and of those the fewest bytes sent."""
    n = len(costs) - 1
    # Where nothing may cross, not even a free byte does.
    ends = costs + np.where(np.isfinite(sent), link * np.nan_to_num(sent, posinf=0.0), np.inf)
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
