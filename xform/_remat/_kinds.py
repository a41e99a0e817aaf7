"""What an equation costs to run a second time: nothing that counts, or work of some kind.

What XLA computes inside the kernel that reads it is free to compute again. All else is work, of a
kind that a user can name; what no table knows is a kernel.
"""

from __future__ import annotations

import math

from xform._amount import at
from xform._buffers import ALIASES, CHEAP, EXPENSIVE, REDUCTIONS
from xform._compat import JaxprEqn, Literal
from xform._cost import cost_of
from xform._remat._jaxprs import build, has_effects
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import given_name, sub_jaxprs

KINDS = ("products", "kernels", "reductions", "random", "collectives")

_BY_NAME = {
    "products": """
        dot_general ragged_dot ragged_dot_general conv_general_dilated scaled_matmul scaled_product
    """,
    "random": """
        random_bits random_seed random_fold_in random_split random_gamma threefry2x32
        rng_bit_generator rng_uniform
    """,
    "collectives": """
        psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_gather_reduced
        reduce_scatter unreduced_reduce_scatter unreduced_psum all_to_all ppermute pgather
        ragged_all_to_all
    """,
    "reductions": " ".join(REDUCTIONS),
}
_KIND = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}
_FREE = CHEAP | EXPENSIVE | ALIASES
_STRUCTURES = frozenset(
    (
        *("scan", "while", "cond", "shard_map", "jit", "remat2", "closed_call", "core_call"),
        *("remat_region", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    )
)
_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call"))
# How many additions an elementary function is worth, and a trip of a loop of unknown length.
_ELEMENTARY, _TRIPS = 10, 10


def kind_of(eqn: JaxprEqn) -> str | None:
    """The kind of work that an equation is, None if it is free."""
    name = eqn.primitive.name
    if has_effects(eqn):
        return "kernels"
    if name in _WITH_RULES:  # a `custom_jvp` that is not differentiated
        kinds = [kind_of(inner) for inner in called(eqn).eqns]  # pyright: ignore[reportOptionalMemberAccess]
        return next((kind for kind in kinds if kind is not None), None)
    if name in _FREE or given_name(eqn) is not None:
        return None
    return _KIND.get(name, "kernels")


def kinds_inside(eqn: JaxprEqn) -> set[str]:
    """The kinds of work in the bodies of a loop, a branch or a `shard_map`."""
    if eqn.primitive.name not in _STRUCTURES:
        return set()
    inner = [e for _, body in sub_jaxprs(eqn) for e in body.eqns]
    kinds = (kind_of(e) for e in inner if e.primitive.name not in _STRUCTURES)
    return {kind for kind in kinds if kind is not None}.union(*map(kinds_inside, inner))


def size_of(atom) -> int:
    """The number of elements of a value."""
    return math.prod(getattr(atom.aval, "shape", ()))


def nbytes(atom) -> int:
    """The bytes of a value; 0 of a literal and of what is no array."""
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None or isinstance(atom, Literal) else size_of(atom) * dtype.itemsize


def flops(eqn: JaxprEqn) -> int:
    """How much an equation computes, and moves: operations and elements."""
    name, size = eqn.primitive.name, sum(map(size_of, eqn.outvars))
    if given_name(eqn) is not None:
        return 0
    if name in _FREE:
        return 0 if name in ALIASES else size * (_ELEMENTARY if name in EXPENSIVE else 1)
    if name == "flex_attention":  # two products, the mask left out of account: it costs to look
        queries, keys = (v.aval for v in eqn.invars[:2])
        return 4 * math.prod(queries.shape) * keys.shape[-3] + size  # pyright: ignore[reportAttributeAccessIssue]
    known = dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
    costs = cost_of(build(list(known), list(eqn.outvars), [eqn]), strict=False)
    total = costs.total
    found = at(
        total.flops + total.transcendentals * _ELEMENTARY, dict.fromkeys(costs.trips, _TRIPS)
    )
    return int(float(found)) + sum(map(size_of, eqn.invars)) + size
