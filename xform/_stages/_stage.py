"""A stage as a function that an executor can call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import JaxprEqn, Var, jaxpr_as_fun, scan_operands, varying_axes
from xform._stages._program import Program
from xform._stages._vary import cast, vary


class Stage:
    """A stage as a function of its weights, of what travels, and of the batch.

    Attributes:
      key: what it does; stages of one key are the same function.
    """

    def __init__(self, program: Program, bound: tuple[int, int], pieces, slots, before, after):
        self.program, self.units, self.bound = program, program.units[slice(*bound)], bound
        self.pieces, self.slots, self.before, self.after = pieces, slots, before, after
        self.is_last = bound[1] == len(program.units)
        wanted = [v for unit in self.units for v in program.names_in(unit.eqn.invars)]
        wanted += program.names_in(program.jaxpr.outvars) if self.is_last else []
        self.free = program.free(wanted)
        runs = Counter(id(unit.eqn) for unit in self.units)
        whole = [unit.turn < 0 for unit in self.units]
        # Layers of one scan are alike, wherever they begin; so are stages of as many of them.
        lengths = tuple((p.leaf, p.stop - p.start) for p in pieces)
        batch_slices = self._first_turn() if self._scans_batch() else None
        self.key = (
            tuple(runs.items()), any(whole), lengths, tuple(slots), self.is_last,
            tuple(map(id, before[0])), tuple(before[1]), tuple(map(id, after[0])), tuple(after[1]),
            batch_slices,
        )  # fmt: skip

    def _first_turn(self) -> int:
        return next((unit.turn for unit in self.units if unit.turn >= 0), 0)

    def _scans_batch(self) -> bool:
        """Whether a scan goes over something that is no parameter, so that it matters where."""
        program = self.program
        for unit in self.units:
            if unit.turn >= 0:
                consts, carry = scan_operands(unit.eqn)
                xs = program.names_in(unit.eqn.invars[consts + carry :])
                return any(v not in program.leaf for v in xs)
        return False

    def __call__(self, weights: Sequence, x: Sequence, batch) -> list:
        """What travels, after this stage."""
        here = self._here(batch)
        program, env = here.program, {}
        env.update(zip(program.jaxpr.constvars, program.jaxpr.consts, strict=True))
        env.update(zip(program.batch_vars, jax.tree.leaves(batch), strict=True))
        layers: dict[int, Any] = {}
        for piece, slot in zip(self.pieces, self.slots, strict=True):
            if not piece.layered:
                env[program.param_vars[piece.leaf]] = weights[slot]
            else:
                layers[piece.leaf] = weights[slot][: piece.stop - piece.start]
        env.update(zip(here.before[0], (x[1 + i] for i in self.before[1]), strict=True))
        for eqn in here.free:
            program.run(eqn, env)
        here.run(env, layers)
        out = [jnp.zeros(v.shape, v.dtype) for v in x]
        if self.is_last:
            out[0] = program.value(program.jaxpr.outvars[0], env)
        for v, i in zip(here.after[0], self.after[1], strict=True):
            out[1 + i] = env[v]
        return [vary(v, batch) for v in out]

    def _here(self, batch) -> Stage:
        """The same stage of the program as it is traced here, where the batch is."""
        here = self.program.here(batch)
        edges = [
            (here.crossing(cut) if 0 < cut < len(here.units) else [], at[1])
            for cut, at in zip(self.bound, (self.before, self.after), strict=True)
        ]
        return Stage(here, self.bound, self.pieces, self.slots, *edges)

    def run(self, env: dict, layers: dict[int, Any]) -> None:
        """Adds what the units make, of layers by their parameter."""
        units = [*self.units]
        while units:
            eqn = units[0].eqn
            turns = [unit.turn for unit in units if unit.eqn is eqn]
            del units[: len(turns)]
            if turns[0] < 0:
                self.program.run(eqn, env)
            else:
                self._scan(eqn, turns, env, layers)

    def _scan(self, eqn: JaxprEqn, turns: Sequence[int], env: dict, layers: dict) -> None:
        """Some turns of a scan, whose carry begins where the stage before left it."""
        program, (consts, carry) = self.program, scan_operands(eqn)
        body, leaf = eqn.params["jaxpr"], self.program.leaf
        fixed = [program.value(v, env) for v in eqn.invars[:consts]]
        begins = eqn.invars[consts : consts + carry] if turns[0] == 0 else eqn.outvars[:carry]
        now = [
            cast(program.value(v, env), varying_axes(inner.aval))
            for v, inner in zip(begins, body.invars[consts : consts + carry], strict=True)
        ]
        xs = []
        for v, inner in zip(
            eqn.invars[consts + carry :], body.invars[consts + carry :], strict=True
        ):
            part = layers.get(leaf.get(program.root(v), -1)) if isinstance(v, Var) else None
            part = program.value(v, env)[turns[0] : turns[-1] + 1] if part is None else part
            xs.append(cast(part, varying_axes(inner.aval)))
        apply = jaxpr_as_fun(body)
        turn = lambda now, x: (apply(*fixed, *now, *x)[:carry], None)
        env.update(zip(eqn.outvars[:carry], lax.scan(turn, now, xs)[0], strict=True))
