"""What a program is computed in: a policy of dtypes, and the formats of its matrix products."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from xform._precision._formats import FORMATS


@dataclass(frozen=True)
class Products:
    """Formats of the operands of matrix products, narrower than what activations are held in.

    Attributes:
      forward: a name of `FORMATS` for the operands of the forward pass; None leaves them in the
        policy's `compute`.
      backward: the same for cotangents, in the two products of the backward pass; None computes
        both in `compute`.
      delayed: whether a tensor's scale comes from its last steps (`history` of them), which the
        caller carries as a state, or from the tensor itself.
      history: how many steps a delayed scale looks back.
    """

    forward: str | None = "e4m3"
    backward: str | None = "e5m2"
    delayed: bool = False
    history: int = 16

    def __post_init__(self):
        wrong = [
            f"`{name}` is {value!r}; there is {', '.join(map(repr, FORMATS))}, or None"
            for name, value in (("forward", self.forward), ("backward", self.backward))
            if value is not None and value not in FORMATS
        ]
        kinds = [FORMATS[f] for f in (self.forward, self.backward) if f in FORMATS]
        if self.delayed and any(kind.block for kind in kinds):
            wrong.append("`delayed` is of scales of whole tensors, and a format has one per block")
        if self.delayed and not kinds:
            wrong.append("`delayed` scales nothing, since neither pass has a format")
        if self.history < 1:
            wrong.append(f"`history` is {self.history}; needed is at least 1")
        if wrong:
            raise ValueError(f"Products: {'; '.join(wrong)}.")


@dataclass(frozen=True)
class Policy:
    """The dtypes that a program written in float32 is computed in.

    Attributes:
      compute: of matrix products' operands, and of what is computed from products.
      params: what float32 arguments are rounded to once, before anything; None keeps them. They are
        cast where they are used, and their gradients are float32.
      accumulate: of sums, powers, roots, exponentials and logarithms. (Products of narrow operands
        add up in float32 on every device.)
      reduce: of sums over devices, in either pass.
      output: of float32 results; None keeps float32.
      products: formats of products' operands that are narrower still; None is `compute`.

    >>> from xform import Policy
    >>> Policy(compute="float16").compute
    dtype('float16')
    """

    compute: Any = jnp.bfloat16
    params: Any = None
    accumulate: Any = jnp.float32
    reduce: Any = jnp.float32
    output: Any = None
    products: Products | None = None

    def __post_init__(self):
        wrong = []
        for field in dataclasses.fields(self)[:5]:
            value = getattr(self, field.name)
            if value is None and field.name in ("params", "output"):
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                wrong.append(f"`{field.name}` is {value!r}; needed is float32, bfloat16 or float16")
            else:
                object.__setattr__(self, field.name, dtype)
        if wrong:
            raise ValueError(
                f"Policy: {'; '.join(wrong)}. Narrower formats are of products: "
                "`Policy(products=Products('e4m3', 'e5m2'))`."
            )


POLICIES: Mapping[str, Policy] = {
    "f32": Policy(compute=jnp.float32),
    "bf16": Policy(),
    "f16": Policy(compute=jnp.float16),
    "fp8": Policy(products=Products()),
    "fp8_delayed": Policy(products=Products(delayed=True)),
    "fp8_forward": Policy(products=Products(backward=None)),
    "mxfp8": Policy(products=Products("mxfp8", "mxfp8_e5m2")),
    "mxfp4": Policy(products=Products("mxfp4", None)),
    "nvfp4": Policy(products=Products("nvfp4", None)),
}
"""Policies by the names that `precision` takes."""


def policy_of(policy: Policy | str) -> Policy:
    """A policy by its name, or as it is."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(
            f"`policy` is {policy!r}; needed is a `Policy`, or one of {', '.join(POLICIES)}"
        )
    return POLICIES[policy]
