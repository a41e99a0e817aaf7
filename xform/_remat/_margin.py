"""What XLA may need besides what `xform.memory` foresees: a plan is to stay within its budget.

Where the model is known to be less sure, more is set aside. A program pays for what it has of that,
and so do all of its plans alike.
"""

from __future__ import annotations

import jax.numpy as jnp

from xform._compat import Jaxpr, JaxprEqn
from xform._remat._kinds import nbytes
from xform.jaxpr import walk

# Of what is needed at once besides what is saved, the part that XLA may need more than is foreseen:
# for copies in another layout, and for the parts of sums that it splits.
_UNKNOWN = 0.25
# The same on a CPU that holds in 32 bits what a program holds in 16, and takes complex products
# apart.
_UNKNOWN_OF_PRODUCTS = 1.0
# What any compiler takes apart into steps of its own, with a copy of the operands between them.
_BY_INDEX = frozenset(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"))
# And what a CPU's does.
_TAKEN_APART = _BY_INDEX | frozenset(
    (
        *("sort", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd"),
        *("hessenberg", "triangular_solve", "tridiagonal"),
    )
)


def margin(jaxpr: Jaxpr, passing: int, *, on_cpu: bool) -> int:
    """Returns the bytes to set aside for a program.

    Args:
      jaxpr: the program.
      passing: what it needs at once besides what is saved.
      on_cpu: whether a CPU's compiler is what it is for.
    """
    eqns = [site.eqn for site in walk(jaxpr)]
    apart = _TAKEN_APART if on_cpu else _BY_INDEX
    copies = (_operands(eqn) for eqn in eqns if eqn.primitive.name in apart)
    copied = max(copies, default=0)
    if not on_cpu:
        return int(_UNKNOWN * passing) + copied
    # A CPU turns the kernels of convolutions around, and may hold one while it needs another.
    convolutions = (eqn for eqn in eqns if eqn.primitive.name == "conv_general_dilated")
    kernels = (min(map(nbytes, (*eqn.invars, *eqn.outvars))) for eqn in convolutions)
    copied = max(copied, *kernels, 0)
    part = _UNKNOWN_OF_PRODUCTS if any(map(_is_unsure, eqns)) else _UNKNOWN
    woven = sum(nbytes(v) for eqn in eqns if _weaves(eqn) for v in eqn.outvars)
    return int(part * passing) + copied + woven


def _is_unsure(eqn: JaxprEqn) -> bool:
    """Whether it is a product of numbers of 16 bits, or of complex ones."""
    is_product = eqn.primitive.name in ("dot_general", "conv_general_dilated")
    types = [getattr(v.aval, "dtype", jnp.dtype(bool)) for v in eqn.invars] if is_product else ()
    is_narrow = lambda t: jnp.issubdtype(t, jnp.floating) and t.itemsize == 2
    return any(is_narrow(t) or jnp.issubdtype(t, jnp.complexfloating) for t in types)


def _operands(eqn: JaxprEqn) -> int:
    return sum(map(nbytes, eqn.invars))


def _weaves(eqn: JaxprEqn) -> bool:
    """Whether it puts elements between others, as each level of an associative scan does."""
    widths = eqn.params["padding_config"] if eqn.primitive.name == "pad" else ()
    return any(between > 0 for _, _, between in widths)
