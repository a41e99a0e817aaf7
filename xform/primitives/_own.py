"""What mods read at their own batch entry or head alone.

`ids[b, q]` reads the ids of entry b and no others. A device that has some of the entries then needs
no more of `ids` than its own part, which is what a mesh that splits the batch usually gives it.
Seen is what indexing makes: the index itself, or one with the length added where it is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.lowering._spec import Read, Spec

type Own = Mapping[int, str]
"""Of some dimensions of an array: "B" if it is read at b alone, "H" if at h."""


def of_reads(reads: Sequence[Read]) -> Own:
    """Of a captured array that a score reads in these places.

    >>> of_reads([Read((), None)])  # as a whole
    {}
    """
    return _common([_of_read(read) for read in reads])


def of_context(spec: Spec, count: int) -> list[Own]:
    """Of each of the `count` arrays that the mask and the indices of reads are computed from."""
    indices = [read.index for group in spec.reads for read in group]
    programs = [p for p in (spec.mask, *indices) if p is not None]
    arrays = range(count - bool(spec.dropout))  # after them comes the key
    own = [_common([x for p in programs for x in _of_array(p, p.invars[4 + i])]) for i in arrays]
    return [*own, *[{}] * bool(spec.dropout)]


def _common(seen: Sequence[Own]) -> Own:
    """What all of these say alike; of an array that nobody reads, nothing."""
    first, *others = seen or [{}]
    return {d: name for d, name in first.items() if all(x.get(d) == name for x in others)}


def _of_read(read: Read) -> Own:
    if read.index is None:
        return {}
    (start,) = read.index.outvars
    dims = read.dimension_numbers.start_index_map
    return _at(read.index, dims, _entries(read.index, start), read.slice_sizes)


def _of_array(program: Jaxpr, array: Var) -> list[Own]:
    """What each of the equations says that take an array."""
    eqns = [eqn for eqn in program.eqns if any(x is array for x in eqn.invars)]
    own = [_of_equation(program, eqn, array) for eqn in eqns]
    return [*own, {}] if any(x is array for x in program.outvars) else own


def _of_equation(program: Jaxpr, eqn: JaxprEqn, array: Var) -> Own:
    operand, *others = eqn.invars
    if operand is not array or any(x is array for x in others):
        return {}
    if eqn.primitive is lax.dynamic_slice_p:
        dims = range(len(others))
        return _at(program, dims, others, eqn.params["slice_sizes"])
    if eqn.primitive is lax.gather_p:
        dims = eqn.params["dimension_numbers"].start_index_map
        return _at(program, dims, _entries(program, others[0]), eqn.params["slice_sizes"])
    return {}


def _at(program: Jaxpr, dims: Sequence[int], starts: Sequence, sizes: Sequence[int]) -> Own:
    """Of a slice of these sizes, which starts so along these dimensions."""
    if len(starts) != len(dims):
        return {}
    named = {d: _name(program, start) for d, start in zip(dims, starts, strict=True)}
    return {d: name for d, name in named.items() if name and sizes[d] == 1}


def _maker(program: Jaxpr, x) -> JaxprEqn | None:
    return next((eqn for eqn in program.eqns if any(x is out for out in eqn.outvars)), None)


def _entries(program: Jaxpr, x) -> Sequence:
    """The numbers that a vector is put together from; nothing if it is not."""
    eqn = _maker(program, x)
    if eqn is None or eqn.primitive.name not in ("stack", "concatenate", *_SAME):
        return []
    if eqn.primitive.name in _SAME:
        return eqn.invars[:1] if x.aval.size == 1 else []
    return eqn.invars if len(eqn.invars) == x.aval.size else []


_SAME = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy")
"""Operations after which one number is the same one."""


def _name(program: Jaxpr, x) -> str | None:
    """Whether a number is the batch entry, "B", or the head, "H"."""
    if isinstance(x, Literal):
        return None
    if x in program.invars[:2]:
        return "BH"[program.invars.index(x)]
    eqn = _maker(program, x)
    if eqn is None:
        return None
    if eqn.primitive.name in _SAME:
        return _name(program, eqn.invars[0])
    if eqn.primitive is lax.select_n_p and len(eqn.invars) == 3:
        test, other, wrapped = eqn.invars
        below, added = _maker(program, test), _maker(program, wrapped)
        if below and added and below.primitive is lax.lt_p and added.primitive is lax.add_p:
            zero = below.invars[1]
            same = other is below.invars[0] is added.invars[0]
            if same and isinstance(zero, Literal) and zero.val == 0:
                return _name(program, other)
    return None
