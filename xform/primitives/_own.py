"""What mods read at an index of theirs as it is: at their own batch entry, their own query.

`ids[b, q]` reads the ids of entry b and no others. A device that has some of the entries then needs
no more of `ids` than its own part, which is what a mesh that splits the batch usually gives it. And
there must be an entry for each (`xform.primitives._short`).
Seen is what indexing makes: the index itself, or one with the length added where it is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.lowering._spec import Read, Spec

type Own = Mapping[int, str]
"""Of some dimensions of an array: "B" if it is read at b alone, "H" if at h."""
type Names = Mapping[Var, str]
"""What the indices that are looked for are called, by their variables in a program."""


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
    starts = _entries(read.index, start)
    return _at(read.index, _own_names(read.index), dims, starts, read.slice_sizes)


def _of_array(program: Jaxpr, array: Var) -> list[Own]:
    """What each of the equations says that take an array."""
    eqns = [eqn for eqn in program.eqns if any(x is array for x in eqn.invars)]
    names = _own_names(program)
    reads = lambda eqn: eqn.invars[0] is array and not any(x is array for x in eqn.invars[1:])
    own = [of_equation(program, eqn, names) if reads(eqn) else {} for eqn in eqns]
    return [*own, {}] if any(x is array for x in program.outvars) else own


def _own_names(program: Jaxpr) -> Names:
    return dict(zip(program.invars[:2], "BH", strict=True))


def of_equation(program: Jaxpr, eqn: JaxprEqn, names: Names) -> Own:
    """Which dimensions of its first operand an equation reads at one of these indices alone."""
    if eqn.primitive is lax.dynamic_slice_p:
        starts = eqn.invars[1:]
        return _at(program, names, range(len(starts)), starts, eqn.params["slice_sizes"])
    if eqn.primitive is lax.gather_p:
        dims, starts = eqn.params["dimension_numbers"].start_index_map, eqn.invars[1]
        return _at(program, names, dims, _entries(program, starts), eqn.params["slice_sizes"])
    return {}


def _at(
    program: Jaxpr, names: Names, dims: Sequence[int], starts: Sequence, sizes: Sequence[int]
) -> Own:
    """Of a slice of these sizes, which starts so along these dimensions."""
    if len(starts) != len(dims):
        return {}
    named = {d: name_of(program, names, start) for d, start in zip(dims, starts, strict=True)}
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


def name_of(program: Jaxpr, names: Names, x) -> str | None:
    """The name of the index that a number is, None if it is another number."""
    if isinstance(x, Literal):
        return None
    if x in names:
        return names[x]
    eqn = _maker(program, x)
    if eqn is None:
        return None
    if eqn.primitive.name in _SAME:
        return name_of(program, names, eqn.invars[0])
    if eqn.primitive is lax.select_n_p and len(eqn.invars) == 3:
        test, other, wrapped = eqn.invars
        below, added = _maker(program, test), _maker(program, wrapped)
        if below and added and below.primitive is lax.lt_p and added.primitive is lax.add_p:
            zero = below.invars[1]
            same = other is below.invars[0] is added.invars[0]
            if same and isinstance(zero, Literal) and zero.val == 0:
                return name_of(program, names, other)
    return None
