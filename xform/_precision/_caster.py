"""Runs the plain equations of a program on values in a policy's dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Var, source_info_util
from xform._precision._classes import ACCUMULATES, LIKE_OPERANDS, REDUCE, ROUNDS
from xform._precision._held import (
    FIXED,
    LEAF,
    NARROW,
    WIDE,
    Held,
    governed,
    join,
    lift,
    shared_in,
    slots_of,
)
from xform._precision._policy import Policy
from xform._precision._products import Options, product
from xform._single import single
from xform.jaxpr._interpret import called, evaluate
from xform.jaxpr._rewrite import rewrite
from xform.jaxpr._walk import sub_jaxprs

type Rule = Callable[..., list[Held]]  # of a caster, an equation, its operands, their states


class Caster:
    """Runs a program on values in the policy's dtypes."""

    def __init__(self, policy: Policy, rules: Mapping[str, Rule]):
        self.policy, self.rules = policy, rules
        self.shared: set[Var] = set()
        self.jaxprs: list[Jaxpr] = []  # kept alive, since `shared` knows their variables

    def run(self, jaxpr: Jaxpr, args: Sequence[Held], state: Sequence) -> list[Held]:
        self.shared |= shared_in(jaxpr)
        self.jaxprs.append(jaxpr)
        left = list(state)

        def apply(eqn: JaxprEqn, *held: Held) -> list[Held]:
            count = len(slots_of(eqn)) if left else 0
            mine, left[:] = left[:count], left[count:]
            stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
            source = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
            with source, eqn.ctx.manager:
                return self.once(eqn, self.equation(eqn, held, mine))

        return evaluate(jaxpr, jaxpr.consts, args, apply, lift)

    def equation(self, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
        name = eqn.primitive.name
        if rule := self.rules.get(name):
            return rule(self, eqn, held, state)
        if name.startswith("custom_") and sub_jaxprs(eqn):
            return self.custom(eqn, held)
        if (body := called(eqn)) is not None:
            return self.run(body, held, state)
        if name in ACCUMULATES:
            return self.wide(eqn, held)
        if name in REDUCE:
            return self.reduce(eqn, held)
        if name in LIKE_OPERANDS:
            return self.like_operands(eqn, held)
        return self.as_written(eqn, held)

    def dtype(self, kind: str) -> Any:
        return {NARROW: self.policy.compute, WIDE: self.policy.accumulate}.get(kind, jnp.float32)

    # ---- plain equations ---------------------------------------------------------------------

    def like_operands(self, eqn: JaxprEqn, held: Sequence[Held]) -> list[Held]:
        kind = join(h.kind for h in held)
        params = dict(eqn.params)
        if eqn.primitive.name == "convert_element_type" and governed(eqn.outvars[0].aval):
            # Of a narrower float: somebody asked for float32. Of an integer: a constant or a count.
            narrow = jnp.issubdtype(jnp.result_type(held[0].array), jnp.floating)
            return self.bind(eqn, held, WIDE if narrow else LEAF, params)
        if kind in (NARROW, WIDE) or not _one_dtype(held):
            held = [self.cast(h, kind) for h in held]
        return self.bind(eqn, held, kind, params)

    def wide(self, eqn: JaxprEqn, held: Sequence[Held]) -> list[Held]:
        kind = join(h.kind for h in held)
        kind = WIDE if kind == NARROW else kind
        return self.bind(eqn, [self.cast(h, kind) for h in held], kind, eqn.params)

    def reduce(self, eqn: JaxprEqn, held: Sequence[Held]) -> list[Held]:
        """In `reduce`, and back again: the copies on the way are free beside what is sent."""
        sent = [
            Held(h.array.astype(self.policy.reduce), h.kind) if h.kind in (NARROW, WIDE) else h
            for h in held
        ]
        outs = self.bind(eqn, sent, FIXED, eqn.params)
        return [
            Held(out.array.astype(h.array.dtype), h.kind) for out, h in zip(outs, held, strict=True)
        ]

    def as_written(self, eqn: JaxprEqn, held: Sequence[Held]) -> list[Held]:
        """In float32, for equations that hold their dtypes; what is made of products is narrow."""
        kind = join(h.kind for h in held)
        outs = self.bind(eqn, [self.written(h) for h in held], LEAF, eqn.params)
        kind = WIDE if kind == NARROW and eqn.primitive.name == "scatter-add" else kind
        return [self.cast(h, kind) if h.kind == LEAF else h for h in outs]

    def custom(self, eqn: JaxprEqn, held: Sequence[Held]) -> list[Held]:
        """A function with derivative rules of its own: those stay, and see float32."""
        rules = {"dot_general": self.product_as_written}
        bind = eqn.primitive.bind
        params = eqn.primitive.get_bind_params(eqn.params)
        arrays = [self.written(h).array for h in held]
        outs = rewrite(lambda *xs: bind(*xs, **params), rules)(*arrays)
        kind = join(h.kind for h in held)
        found = [
            self.label(x, v, LEAF) for x, v in zip(_listed(eqn, outs), eqn.outvars, strict=True)
        ]
        return [self.cast(h, kind) if h.kind == LEAF else h for h in found]

    def bind(self, eqn: JaxprEqn, held: Sequence[Held], kind: str, params: Any) -> list[Held]:
        arrays = [h.array for h in held]
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(dict(params)))
        outs = _listed(eqn, out)
        return [self.label(x, v, kind) for x, v in zip(outs, eqn.outvars, strict=True)]

    def label(self, array: Any, var: Var, kind: str) -> Held:
        if not governed(var.aval):
            return Held(array, FIXED)
        kind = LEAF if kind == FIXED else kind
        return Held(array, kind)

    def once(self, eqn: JaxprEqn, outs: list[Held]) -> list[Held]:
        """What has several readers is rounded for all of them."""
        if eqn.primitive.name not in ROUNDS:
            return outs
        return [
            Held(single(h.array), NARROW)
            if h.kind == NARROW and v in self.shared and h.array.dtype.itemsize == 2
            else h
            for h, v in zip(outs, eqn.outvars, strict=True)
        ]

    def cast(self, held: Held, kind: str) -> Held:
        """A value in the dtype of a kind; what the policy does not govern stays.

        Not every value of a kind has its dtype: arguments may be rounded to `params`, and a program
        that asks for float32 gets it, until they meet others.
        """
        if held.kind == FIXED or kind == FIXED:
            return held
        return Held(jnp.asarray(held.array).astype(self.dtype(kind)), kind)

    def written(self, held: Held) -> Held:
        return (
            held
            if held.kind == FIXED
            else Held(jnp.asarray(held.array).astype(jnp.float32), held.kind)
        )

    # ---- products ----------------------------------------------------------------------------

    def product(self, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
        """In `compute`; partial sums of narrow operands are float32 on every device."""
        if any(h.kind == FIXED for h in held):
            return self.bind(eqn, held, WIDE, eqn.params)
        params, compute = dict(eqn.params), self.policy.compute
        if has_algorithm(params):
            return self.bind(eqn, [self.written(h) for h in held], WIDE, params)
        if eqn.primitive.name == "dot_general" and (options := self.options(params)):
            x, y = (h.array for h in held)
            return [Held(product(x, y, state[0] if state else None, options), NARROW)]
        narrow = [Held(jnp.asarray(h.array).astype(compute), NARROW) for h in held]
        params["preferred_element_type"] = compute
        return self.bind(eqn, narrow, NARROW, params)

    def options(self, params: Mapping[str, Any]) -> Options | None:
        """What a product with these parameters is in the policy's formats, if it has some."""
        if self.policy.products is None:
            return None
        dims = tuple(tuple(tuple(map(int, d)) for d in p) for p in params["dimension_numbers"])
        of = self.policy
        return Options(dims, of.products, of.compute, params.get("out_sharding"))  # pyright: ignore[reportArgumentType]

    def product_as_written(self, x: Any, y: Any, **params) -> Any:
        """The rule of a product inside of a custom derivative: float32 in and out."""
        if x.dtype != jnp.float32 or y.dtype != jnp.float32 or has_algorithm(params):
            return lax.dot_general_p.bind(x, y, **params)
        if options := self.options(params):
            return product(x, y, None, options).astype(jnp.float32)
        params["preferred_element_type"] = compute = self.policy.compute
        x, y = x.astype(compute), y.astype(compute)
        return lax.dot_general_p.bind(x, y, **params).astype(jnp.float32)

    def attention(self, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
        """q, k and v in `compute`; what mods read as it is written."""
        del state
        spec, compute = eqn.params["spec"], self.policy.compute
        if spec.dtype != jnp.float32:
            return self.as_written(eqn, held)
        arrays = [self.cast(h, NARROW) for h in held[:3]] + [self.written(h) for h in held[3:]]
        dtype = eqn.params["dtype"]
        params = dict(eqn.params, spec=replace(spec, dtype=jnp.dtype(compute)))
        params["dtype"] = jnp.dtype(compute) if dtype == jnp.float32 else dtype
        out, *rest = self.bind(eqn, arrays, WIDE, params)
        return [Held(out.array, NARROW), *rest]

    def cross_entropy(self, eqn: JaxprEqn, held: Sequence[Held], state: Sequence) -> list[Held]:
        """Hidden states and weights in `compute`; the loss is wide."""
        del state
        spec = eqn.params["spec"]
        if spec.dtype != jnp.float32:
            return self.as_written(eqn, held)
        arrays = [self.cast(h, NARROW) for h in held[:2]] + [self.written(h) for h in held[2:]]
        params = dict(eqn.params, spec=replace(spec, dtype=jnp.dtype(self.policy.compute)))
        return self.bind(eqn, arrays, WIDE, params)


def has_algorithm(params: Mapping[str, Any]) -> bool:
    """Whether a product says what it is computed in: that of float32 operands stays so."""
    return isinstance(params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _one_dtype(held: Sequence[Held]) -> bool:
    """Whether all values that the policy governs are in one dtype."""
    return len({jnp.result_type(h.array) for h in held if h.kind != FIXED}) < 2


def _listed(eqn: JaxprEqn, out: Any) -> list:
    return list(out) if eqn.primitive.multiple_results else [out]
