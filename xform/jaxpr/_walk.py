"""Look at a program: every equation, at every depth, with the line that made it."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxtyping

from xform._compat import Jaxpr, JaxprEqn, source_info_util, user_frames
from xform._show import named

UNKNOWN = "unknown"

# Their frames stand between the user's line and the equation; the second where shapes are checked.
_NOT_THE_USERS = tuple(
    str(Path(path).parent) for path in (Path(__file__).parent, jaxtyping.__file__)
)


@dataclass(frozen=True)
class Site:
    """One equation and where it stands.

    Attributes:
        eqn: the equation.
        parents: the enclosing equations, outermost first, each with the name of the sub-jaxpr of
            it that leads here.
    """

    eqn: JaxprEqn
    parents: tuple[tuple[JaxprEqn, str], ...] = ()

    @property
    def path(self) -> tuple[tuple[str, str], ...]:
        """The enclosing primitives by name: `(("scan", "jaxpr"), ("cond", "branches[1]"))`."""
        return tuple((eqn.primitive.name, label) for eqn, label in self.parents)

    @property
    def depth(self) -> int:
        """How many equations enclose this one."""
        return len(self.parents)

    @property
    def line(self) -> str:
        """The user's line that made the equation, or else the innermost one that encloses it."""
        eqns = (self.eqn, *(eqn for eqn, _ in reversed(self.parents)))
        return next((line for line in map(source_line, eqns) if line != UNKNOWN), UNKNOWN)


def walk(jaxpr: Jaxpr) -> Iterator[Site]:
    """Yields every equation of a jaxpr and of the jaxprs inside its equations, in program order.

    An equation comes before what it encloses. A body is visited once, however often it runs.

    >>> from xform.jaxpr import trace, walk
    >>> f = lambda xs: jax.lax.scan(lambda c, x: (c * x, c), xs[0], xs)
    >>> for site in walk(trace(f, jax.numpy.ones(3))):
    ...     print(site.eqn.primitive.name, site.path)
    slice ()
    squeeze ()
    scan ()
    mul (('scan', 'jaxpr'),)
    """
    return _walk(jaxpr, ())


def _walk(jaxpr: Jaxpr, parents: tuple[tuple[JaxprEqn, str], ...]) -> Iterator[Site]:
    for eqn in jaxpr.eqns:
        yield Site(eqn, parents)
        for label, body in sub_jaxprs(eqn):
            yield from _walk(body, (*parents, (eqn, label)))


def sub_jaxprs(eqn: JaxprEqn) -> list[tuple[str, Jaxpr]]:
    """Returns the jaxprs in an equation's parameters, each named by its place there.

    >>> from xform.jaxpr import sub_jaxprs, trace
    >>> f = lambda x: jax.lax.cond(x > 0, jax.numpy.sin, jax.numpy.cos, x)
    >>> [label for label, body in sub_jaxprs(trace(f, 1.0).eqns[-1])]
    ['branches[0]', 'branches[1]']
    """
    return [found for key, value in own_params(eqn).items() for found in _labelled(value, key)]


def own_params(eqn: JaxprEqn) -> Mapping[str, Any]:
    """The parameters of an equation; a hijax primitive hides its own in the parameter `_prim`."""
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def given_name(eqn: JaxprEqn) -> str | None:
    """The name that an equation gives its operand, if it is a `jax.ad_checkpoint.checkpoint_name`.

    There are three forms: JAX's primitive, and what `jax_remat3` puts in its place in programs and
    in the forward rules of a `custom_vjp`.
    """
    hijax = type(eqn.params.get("_prim")).__name__
    if eqn.primitive.name == "name" or hijax in ("CheckpointName", "CheckpointNameFwd"):
        return own_params(eqn)["name"]
    return None


def _labelled(value: Any, label: str) -> Iterator[tuple[str, Jaxpr]]:
    match value:
        case Jaxpr():
            yield label, value
        case jax.stages.Traced():
            yield label, value.jaxpr
        case _ if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                yield from _labelled(getattr(value, field.name), f"{label}.{field.name}")
        case tuple() | list():
            for key, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
                yield from _labelled(item, f"{label}[{key}]")


class Carried(NamedTuple):
    """How the operands of a loop divide: first those of every turn, then the carry, then the rest.

    Attributes:
        consts: how many operands each turn reads as they are.
        carry: how many values go from turn to turn. They are the first results, too.
    """

    consts: int
    carry: int


def carried(eqn: JaxprEqn) -> Carried:
    """Returns how the operands of a `scan` or a `while` divide.

    The operands of a scan are consts, carry and what is scanned over; its results the carry and
    what is stacked. Those of a while are the consts of its condition and of its body, and the
    carry. Versions of JAX write this down differently; so the rule of a loop asks here:

    >>> from xform.jaxpr import carried, interpret, eqn_rule, trace
    >>> def scan(eqn, *args):
    ...     (n, m), body = carried(eqn), interpret(eqn.params["jaxpr"], rules)
    ...     consts, carry = args[:n], args[n : n + m]
    ...     for _ in range(eqn.params["length"]):
    ...         carry = body(*consts, *carry)
    ...     return carry
    >>> rules = {"mul": lambda a, b, **_: a * b, "scan": eqn_rule(scan)}
    >>> f = lambda x, y: jax.lax.scan(lambda c, _: (c * x, None), y, length=3)[0]
    >>> interpret(f, rules)(2, 5)
    40

    Raises:
        ValueError: if the equation is no loop.
    """
    params = eqn.params
    if eqn.primitive.name == "while":
        consts = params["cond_nconsts"] + params["body_nconsts"]
        return Carried(consts, len(eqn.invars) - consts)
    if eqn.primitive.name != "scan":
        raise ValueError(
            f"`carried` is of a `scan` or a `while`, and `{eqn.primitive.name}` (at "
            f"{source_line(eqn)}) is neither."
        )
    body = params["jaxpr"]
    rank = lambda var: len(getattr(var.aval, "shape", ()))
    # What is scanned over, or stacked, has one dimension more than its slice in the body.
    whole = sum(rank(x) == rank(y) for x, y in zip(eqn.invars, body.invars, strict=True))
    carry = sum(rank(x) == rank(y) for x, y in zip(eqn.outvars, body.outvars, strict=True))
    return Carried(whole - carry, carry)


def source_line(eqn: JaxprEqn) -> str:
    """Returns the user's line that made an equation, as `"file:line (function)"`.

    In a notebook the file is the cell, `"In[3]:2 (f)"`. Frames of JAX and of xform are skipped.
    Where JAX recorded no other, the answer is `"unknown"`: in `lax.map(jnp.sin, x)` no line of the
    user's made the sine.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: jnp.sin(x)
    >>> source_line(jax.make_jaxpr(f)(1.0).eqns[0])
    '<doctest ...source_line[1]>:1 (<lambda>)'
    """
    return _line_of(eqn.source_info.traceback)


def current_line() -> str:
    """The same, of the equation whose `at_line` the program is in."""
    return _line_of(source_info_util.current().traceback)


def at_line(eqn: JaxprEqn):
    """A context in which new equations are of the line of `eqn`.

    An equation without one, inside a function of JAX's, leaves that of the call.
    """
    if source_line(eqn) == UNKNOWN:
        return contextlib.nullcontext()
    return source_info_util.user_context(eqn.source_info.traceback)


@functools.lru_cache(8192)  # to look through the frames is dear, and many equations share theirs
def _line_of(traceback: Any) -> str:
    for frame in user_frames(traceback):
        if not frame.file_name.startswith(_NOT_THE_USERS):
            return f"{named(frame.file_name)}:{frame.start_line} ({frame.function_name})"
    return UNKNOWN
