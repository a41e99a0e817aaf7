"""How a rule declares its communication, so that a compiled program can be held to it.

A declaration is a name scope, `rule[gather|dp|hidden=all-gather]`. Scopes ride along wherever JAX
takes an operation: through derivatives, `vmap`, loops, `remat`, `shard_map`, the partitioner and
XLA's passes, into the names of a compiled program. So a declaration needs no state, costs nothing
at run time, and reads the same in a jaxpr, in a profile and in the program that runs.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import jax

OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

# What XLA uses itself in the names that it joins is not for names of ours: `/ ( ) : @ "`.
_NAME = re.compile(r"[\w.\-][\w.\- ]*")
_SCOPE = re.compile(r"rule\[([\w.\- ]+)\|([\w.\-,]*)\|([\w.\-,=+]*)\]")


@dataclass(frozen=True)
class Declaration:
    """What may communicate, and what it promises.

    Attributes:
        rule: its name.
        axes: the mesh axes over which it may communicate.
        hidden: operations that have a matrix product between their start and their end.
        once: whether it stays outside of loops.
    """

    rule: str
    axes: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    once: bool = False

    @property
    def scope(self) -> str:
        """The name scope that says it."""
        promises = [f"hidden={'+'.join(self.hidden)}"] if self.hidden else []
        promises += ["once"] if self.once else []
        return f"rule[{self.rule}|{','.join(self.axes)}|{','.join(promises)}]"


@contextmanager
def declare(
    rule: str, *axes: str, hidden: bool | str | Sequence[str] = False, once: bool = False
) -> Iterator[None]:
    """Declares, under the name of a rule, the communication of what is traced inside.

    `audit` fails on communication that no declaration covers, and on a promise that the compiled
    program does not keep. A derivative belongs to the declaration of what it is the derivative of:
    that of a gather is a scatter, that of a `pcast` to "varying" is a sum. Where a value that is
    equal along an axis meets one that is not, JAX inserts such a `pcast`; a rule writes it down
    instead, inside its declaration. Of nested declarations, the innermost that names all axes of a
    collective counts, and the promises of all hold. It is a context manager and a decorator.

    Args:
      rule: Its name: letters, digits, spaces, `_`, `.` and `-`.
      *axes: The mesh axes over which it may communicate.
      hidden: Promises that a matrix product runs between the start and the end of each collective:
        True, or the operations that this is promised of, such as "all-gather".
      once: Promises that none of its collectives stands in a loop.

    Raises:
      ValueError: A name has other characters, or an operation is not a collective.

    >>> with declare("column", "tp"):
    ...     y = jax.numpy.ones(2) * 2
    """
    names = (rule, *axes)
    if bad := [name for name in names if not (name and _NAME.fullmatch(name))]:
        raise ValueError(
            f"`declare{names}`: a rule and an axis have letters, digits, `_`, `.`, `-` and, in a "
            f"rule, spaces; found {', '.join(map(repr, bad))}"
        )
    ops = (hidden,) if isinstance(hidden, str) else hidden
    ops = (OPS if ops else ()) if isinstance(ops, bool) else tuple(ops)
    if bad := [op for op in ops if op not in OPS]:
        raise ValueError(
            f"`declare({rule!r}, hidden={hidden!r})`: `hidden` is True or names of "
            f"{', '.join(OPS)}; found {', '.join(map(repr, bad))}"
        )
    ops = ("all",) if ops == OPS else ops
    with jax.named_scope(Declaration(rule, axes, ops, once).scope):
        yield


def declared(name: str) -> list[Declaration]:
    """Returns the declarations in an operation's name, outermost first.

    >>> declared("jit(f)/transpose(jvp(rule[row|tp|once]))/psum")
    [Declaration(rule='row', axes=('tp',), hidden=(), once=True)]
    """
    found = []
    for rule, axes, promises in _SCOPE.findall(name):
        words = promises.split(",") if promises else []
        hidden = [word.removeprefix("hidden=") for word in words if word.startswith("hidden=")]
        ops = tuple(hidden[0].split("+")) if hidden else ()
        ops = OPS if ops == ("all",) else ops
        found.append(Declaration(rule, tuple(filter(None, axes.split(","))), ops, "once" in words))
    return found


def covering(name: str, axes: Sequence[str]) -> Declaration | None:
    """Returns the innermost declaration in an operation's name that covers all of some axes."""
    fits = [d for d in declared(name) if set(axes) <= set(d.axes)]
    return fits[-1] if fits else None


def separate(name: str) -> list[str]:
    """Returns the names that XLA joined to one, as it does where it joins two operations.

    >>> separate("jit(f)/(jvp(a)/psum:b/psum)")
    ['jit(f)/jvp(a)/psum', 'jit(f)/b/psum']
    """
    for opening in re.finditer(r"(?:^|(?<=/))\(", name):
        depth, cuts = 0, [opening.start()]
        for at in range(opening.start(), len(name)):
            depth += {"(": 1, ")": -1}.get(name[at], 0)
            if name[at] == ":" and depth == 1:
                cuts.append(at)
            if depth == 0:
                cuts.append(at)
                break
        if depth or len(cuts) < 3:
            continue
        head, tail = name[: cuts[0]], name[cuts[-1] + 1 :]
        parts = [name[a + 1 : b] for a, b in pairwise(cuts)]
        return [one for part in parts for one in separate(head + part + tail)]
    return [name]
