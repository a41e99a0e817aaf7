"""`precision`: a program written in float32, computed in what a policy says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xform._precision import _enclosing
from xform._precision._caster import Caster, Rule
from xform._precision._held import FIXED, LEAF, Held, governed, slots
from xform._precision._policy import Policy, policy_of


def precision(f: Callable, policy: Policy | str) -> Any:
    """Returns `f` computed in the dtypes of a policy, where it is written in float32.

    Matrix products, and what is elementwise made of their results, are computed in `compute`; sums,
    powers, roots, exponentials and logarithms in `accumulate`, as is what is made of these;
    sums over devices in `reduce`. Arguments and constants stay float32 until they meet one of
    these, and are cast there: inside of a scan over layers, a layer at a time. So gradients with
    regard to arguments are float32. What is written in another dtype than float32 is left as it is,
    and so is a product with an algorithm of its own (`precision=jax.lax.DotAlgorithmPreset.…`),
    such as the scores of a router, of which a rounded one is another choice.

    A value in `compute` that has several readers is rounded once for all of them (see
    `xform.numerics.single`). Scans, branches, remat, `fuse` and `shard_map` stay what they are; the
    derivative rules of `custom_jvp` and `custom_vjp` are kept, with their products in `compute` and
    all else in float32; `flex_attention` and `linear_cross_entropy` become those of the narrow
    dtype. Apply it to a loss, and differentiate the result: of a gradient that is already taken,
    these two are left in float32.

    Args:
      f: a function of pytrees of arrays.
      policy: a `Policy`, or the name of one: "bf16", "f16", "fp8" (e4m3 forward and e5m2 backward,
        scaled by tensor), "fp8_delayed", "fp8_forward" (bf16 backward), "mxfp8", "mxfp4", "nvfp4",
        "f32".

    Returns:
      A function with the signature of `f`. With delayed scales, one that takes a state before the
      other arguments, which `init(*args)` makes: the gradient with regard to it is the state of the
      next step. Its forward mode is not defined where products have formats of their own.

    Raises:
      ValueError: on a policy that there is not.
      NotImplementedError: while tracing, at a program that can't be built again.

    >>> import jax, jax.numpy as jnp
    >>> from xform import precision
    >>> w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    >>> f = precision(lambda w, x: jnp.sum(jnp.tanh(x @ w)), "bf16")
    >>> [eqn.outvars[0].aval.dtype.name for eqn in jax.make_jaxpr(f)(w, x).eqns[2:4]]
    ['bfloat16', 'bfloat16']
    >>> jax.grad(f)(w, x).dtype
    dtype('float32')
    """
    policy = policy_of(policy)

    def run(state: Sequence, args: tuple, kwargs: dict) -> Any:
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args, **kwargs)
        flat = [_entering(x, policy) for x in jax.tree.leaves((args, kwargs))]
        caster = Caster(policy, _RULES)
        outs = caster.run(jaxpr, flat, state)
        results = [_leaving(*pair, policy) for pair in zip(outs, jaxpr.out_avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    if policy.products is None or not policy.products.delayed:
        return functools.wraps(f)(lambda *args, **kwargs: run((), args, kwargs))

    return WithState(f, run, policy.products.history)


@dataclass(frozen=True)
class WithState:
    """A function whose products have delayed scales: it takes their state before its arguments."""

    f: Callable
    run: Callable
    history: int

    def __call__(self, state: Sequence, *args, **kwargs) -> Any:
        return self.run(state, args, kwargs)

    def init(self, *args, **kwargs) -> list[jax.Array]:
        """Returns the first state: for each product, the sizes of no step so far."""
        jaxpr = jax.make_jaxpr(self.f)(*args, **kwargs)
        return [jnp.zeros((*lead, 3, self.history)) for lead in slots(jaxpr)]


def _entering(x: Any, policy: Policy) -> Held:
    dtype = jnp.result_type(x) if hasattr(x, "dtype") else jnp.asarray(x).dtype
    if dtype != jnp.float32:
        return Held(x, FIXED)
    return Held(x if policy.params is None else jnp.asarray(x).astype(policy.params), LEAF)


def _leaving(held: Held, aval: Any, policy: Policy) -> Any:
    if not governed(aval):
        return held.array
    return jnp.asarray(held.array).astype(policy.output or aval.dtype)


_RULES: Mapping[str, Rule] = {
    "dot_general": Caster.product,
    "conv_general_dilated": Caster.product,
    "ragged_dot_general": Caster.product,
    "flex_attention": Caster.attention,
    "linear_cross_entropy": Caster.cross_entropy,
    "call_hi_primitive": _enclosing.hijax,
    "remat2": _enclosing.remat,
    "fused": _enclosing.fused,
    "scan": _enclosing.scan,
    "while": _enclosing.while_,
    "cond": _enclosing.cond,
    "shard_map": _enclosing.shard_map,
}
