"""What an audit found, as records, text and HTML."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xform._hlo import UNKNOWN, Program
from xform._show import Table, as_html, as_text, short, si
from xform.sharding._declare import Declaration


class AuditError(ValueError):
    """A program that says more than was declared, or hides less than was promised.

    Attributes:
        report: what was found, with its `offenders`.
    """

    def __init__(self, report: "Audit"):
        super().__init__(report.complaint())
        self.report = report


@dataclass(frozen=True)
class Message:
    """One collective of a compiled program.

    Attributes:
        op: such as "all-gather".
        axes: the mesh axes along which it runs.
        rules: the rules that declared it; several, where XLA joined their collectives to one.
        undeclared: JAX's names of the parts of it that no rule declared.
        arrays: the types of what it makes, on one device.
        sent: bytes that one device sends, in one turn.
        trips: how many turns it has in one run of the program; `looped`, whether it is in a loop.
        looped: see there.
        covered: whether a matrix product runs between its start and its end.
        promises: all declarations that it stands in.
        inserted: whether the partitioner put it in, and not the user.
        line: the user's line.
        paths: the arguments that it moves, by path, or else the results that it makes; empty where
            it does neither.
    """

    op: str
    axes: tuple[str, ...]
    rules: tuple[str, ...]
    undeclared: tuple[str, ...]
    arrays: tuple[str, ...]
    sent: int
    trips: int
    looped: bool
    covered: bool
    promises: tuple[Declaration, ...]
    inserted: bool
    line: str
    paths: tuple[str, ...]

    @property
    def what(self) -> str:
        """It in words: `all-gather of bf16[4096,1024] (argument '0/w') over dp`."""
        paths = f" ({few(self.paths)})" if self.paths else ""
        return f"{self.op} of {few(self.arrays)}{paths} over {', '.join(self.axes) or 'no axis'}"


class Offender(NamedTuple):
    """A broken contract.

    Attributes:
        kind: a key of `KINDS`.
        text: what it is, with its path or name, axes and numbers.
        line: the user's line.
    """

    kind: str
    text: str
    line: str


# What each kind of offender is called, and what to do about it.
KINDS = {
    "undeclared": (
        "communicates where no rule declared it",
        "put the operation into `with declare(rule, axes)`, or remove what makes XLA move the data",
    ),
    "exposed": (
        "is promised to be hidden, and no matrix product runs meanwhile",
        "start it earlier, or take `hidden` from its declaration",
    ),
    "repeated": (
        "is promised to run once, and stands in a loop",
        "sum in the loop and communicate after it, or take `once` from its declaration",
    ),
    "whole": (
        "is held whole on every device",
        "split it over an axis, or name it in `replicated`",
    ),
    "remade": (
        "is gathered on every device, only to be split in another way",
        "go from one split to the other in steps that move one axis each",
    ),
    "diverging": (
        "waits for devices that may have taken another branch",
        "move the collective out of the branch or the loop, or make the predicate equal along the "
        "axis, by `jax.lax.pmax` for example",
    ),
}


@dataclass(frozen=True)
class Audit:
    """What `audit` returns; `print` shows it, a notebook draws it.

    Attributes:
        name: of the program.
        device: the kind of device that it was compiled for.
        mesh: size of each axis.
        messages: its collectives, in the order in which they start.
        offenders: contracts that it breaks.
        memory: bytes on each device: of arguments, results and temporaries.
        program: all that was read of it.
    """

    name: str
    device: str
    mesh: Mapping[str, int]
    messages: tuple[Message, ...]
    offenders: tuple[Offender, ...]
    memory: Mapping[str, int]
    program: Program

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns numbers to keep in a file and compare: of each rule, operation and axes.

        `"gather all-gather dp": {"collectives": 2, "in loops": 1, "covered": 1, "turns": 16,
        "sent": …}`; bytes are those of one device in one run.
        """
        found: dict[str, dict[str, int]] = {}
        for m in self.messages:
            rule = "+".join(m.rules) if not m.undeclared else "undeclared"
            row = found.setdefault(
                f"{rule} {m.op} {','.join(m.axes)}",
                dict.fromkeys(("collectives", "in loops", "covered", "turns", "sent"), 0),
            )
            new = (1, m.looped, m.covered, m.trips, m.sent * m.trips)
            for key, value in zip(row, new, strict=True):
                row[key] += value
        return dict(sorted(found.items()))

    def check(self) -> None:
        """Raises `AuditError` if there are offenders."""
        if self.offenders:
            raise AuditError(self)

    def complaint(self) -> str:
        """The offenders in words, by kind."""
        parts = [f"`audit` of {self.name} on {sizes(self.mesh)} of {self.device} found:"]
        for kind, (what, cure) in KINDS.items():
            these = [x for x in self.offenders if x.kind == kind]
            if these:
                many = f"{len(these)} × " if len(these) > 1 else ""
                parts.append(f"{many}{what}; {cure}:")
                parts += [f"  - {x.text}{_at(x.line)}" for x in these]
        return "\n".join(parts)

    def tables(self) -> list[Table]:
        """The report as tables of text."""
        rows = [
            [
                m.op,
                ",".join(m.axes),
                "+".join(m.rules) if not m.undeclared else "UNDECLARED",
                f"{m.trips}" + (" in a loop" if m.looped else ""),
                f"{si(m.sent)}B",
                "yes" if m.covered else "no",
                few(m.arrays, 2),
                few(m.paths, 1),
                short(m.line),
            ]
            for m in self.messages
        ]
        head = ["op", "axes", "rule", "turns", "sent", "product meanwhile", "makes", "of", "line"]
        return [Table("Collectives", head, rows)] if rows else []

    def __str__(self) -> str:
        parts = [self._title(), *map(as_text, self.tables())]
        return "\n\n".join(parts + ([self.complaint()] if self.offenders else []))

    def _repr_html_(self) -> str:
        rest = f"<pre>{html.escape(self.complaint())}</pre>" if self.offenders else ""
        title = f"<h4>{html.escape(self._title())}</h4>"
        return title + "".join(map(as_html, self.tables())) + rest

    def _title(self) -> str:
        held = ", ".join(f"{si(size)}B of {name}" for name, size in self.memory.items() if size)
        sent = sum(m.sent * m.trips for m in self.messages)
        return (
            f"{self.name} on {self.device}, {sizes(self.mesh)}: each device sends {si(sent)}B in "
            f"{sum(m.trips for m in self.messages)} collectives, and holds {held}"
        )


def few(words: Sequence[str], count: int = 3) -> str:
    """The first words of many."""
    return ", ".join(words[:count]) + (", …" if len(words) > count else "")


def _at(line: str) -> str:
    return "" if line == UNKNOWN else f", at {short(line)}"


def sizes(mesh: Mapping[str, int]) -> str:
    """Axes and their sizes in words."""
    return " × ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
