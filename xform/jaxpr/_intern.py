"""One identity for equal programs."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Trace, Tracer

from xform._compat import DebugInfo, EqualStore, Jaxpr, Literal, Store, Unhashable, WrappedFun

_canonical: weakref.WeakValueDictionary[Hashable, Jaxpr] = weakref.WeakValueDictionary()
_fingerprints: weakref.WeakKeyDictionary[Jaxpr, Hashable] = weakref.WeakKeyDictionary()
# Of one that came again, as it came last.
_latest: weakref.WeakKeyDictionary[Jaxpr, Jaxpr] = weakref.WeakKeyDictionary()


def intern(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the one object that stands for all jaxprs of the same program.

    JAX compares jaxprs by identity, so that a closure made afresh on each call is compiled afresh.
    Two interned jaxprs are one object only if their equations are the same: primitives, parameters,
    wiring, types with their weak types, literals bit by bit. Names of variables and source lines do
    not count, and those of the first stay. A `custom_jvp` or `custom_vjp` inside is known by the
    user's rules, which are compared by identity, as is whatever can't be looked into: two equal
    programs may be told apart, two different ones are never merged.

    The object is held weakly: it lives for as long as something uses it.

    Raises:
        ValueError: at constant arrays, which would have to be compared by value.

    >>> from xform.jaxpr import intern, trace
    >>> def double(): return trace(lambda x: 2.0 * x, 1.0)
    >>> a, b = double(), double()
    >>> a is b, intern(a) is intern(b)
    (False, True)
    """
    found = _canonical.setdefault(_fingerprint(jaxpr), jaxpr)
    if found is jaxpr:
        _latest.pop(found, None)
    else:
        _latest[found] = jaxpr
    return found


def latest(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the program last interned as `jaxpr`: errors are about its lines."""
    return _latest.get(jaxpr, jaxpr)


def _fingerprint(jaxpr: Jaxpr) -> Hashable:
    """A program as nested tuples, found once: programs are parts of many others."""
    if (found := _fingerprints.get(jaxpr)) is None:
        found = _fingerprints[jaxpr] = _numbered(jaxpr)
    return found


def _numbered(jaxpr: Jaxpr) -> Hashable:
    """A program as nested tuples, its variables numbered in the order in which they appear."""
    if jaxpr.consts:
        found = ", ".join(jax.typeof(x).str_short() for x in jaxpr.consts)
        raise ValueError(
            f"`intern` takes a program without constant arrays, found {found}: make them arguments "
            "of the function that is traced (`inline` brings those of an inner `jit` to the top)."
        )
    number = {var: i for i, var in enumerate(jaxpr.invars)}

    def read(atom):
        return (_key(atom.val), _key(atom.aval)) if isinstance(atom, Literal) else number[atom]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        for var in eqn.outvars:
            number[var] = len(number)
        results = tuple(_key(var.aval) for var in eqn.outvars)
        what = eqn.primitive, _key(eqn.params), _key(eqn.effects), eqn.ctx
        equations.append((*what, operands, results))
    inputs, outputs = tuple(map(_key, jaxpr.in_avals)), tuple(map(read, jaxpr.outvars))
    return Jaxpr, inputs, tuple(equations), outputs


# JAX's own files, and what the closures made in them hold besides their meaning: the trace at hand.
_JAX = str(Path(jax.__file__).parent)
_BOOKKEEPING = (Trace, DebugInfo, EqualStore, Store)
_MEMO = ("cells", "sentinel")


def _key(value: Any) -> Hashable:
    """Equal for two parameters only if they mean the same.

    The type is part of it, since `1 == 1.0 == True`; numbers and arrays go by their bits, since
    `0.0 == -0.0` and `nan != nan`.
    """
    kind = type(value)
    if kind in _THEMSELVES:
        return kind, value
    if kind is tuple:
        return kind, tuple(map(_key, value))
    match value:
        case Jaxpr():
            return _fingerprint(value)
        case _ if _is_plain(value):
            array = np.asarray(value)
            return kind, array.dtype, array.shape, array.tobytes()
        case Mapping():
            return kind, frozenset((_key(k), _key(v)) for k, v in value.items())
        case tuple() | list():
            return kind, tuple(map(_key, value))
        case set() | frozenset():
            return kind, frozenset(map(_key, value))
        case functools.partial():
            return kind, _key(value.func), _key(value.args), _key(value.keywords)
        case WrappedFun():
            return kind, _key(value.f_transformed)
        case types.FunctionType() if value.__code__.co_filename.startswith(_JAX):
            return kind, value.__code__.co_filename, value.__code__, _captured(value)
        case Unhashable():
            return kind, _key(value.val)
        case jax.lax.Tolerance():
            return kind, value.atol, value.rtol, value.ulps
        case jax.tree_util.PyTreeDef():
            return kind, _key(value.node_data()), _key(value.children())
        case _ if isinstance(value, _BOOKKEEPING):
            return kind
        case _ if not _is_hashable(value):
            return _Identity(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (getattr(value, field.name) for field in dataclasses.fields(value))
            return kind, value, tuple(map(_key, fields))
    return kind, value


# What most parameters are, and what equality alone tells apart.
_THEMSELVES = (str, int, bool, type(None), ShapedArray)


def _captured(f: types.FunctionType) -> Hashable:
    """What a function holds besides its code."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    memo = _MEMO if f.__code__.co_name == "memoized" else ()
    held = tuple(_key(cell.cell_contents) for name, cell in cells if name not in memo)
    return held, _key(f.__defaults__), _key(f.__kwdefaults__)


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """An object without an equality of its own, kept alive so that nothing else gets its id."""

    value: Any

    def __eq__(self, other):
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _is_plain(value: Any) -> bool:
    """Whether a value is its bits: a number or an array, no tracer, no array of PRNG keys."""
    if isinstance(value, Tracer) or not hasattr(value, "__array__"):
        return isinstance(value, float | complex)
    return isinstance(value.dtype, np.dtype)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
