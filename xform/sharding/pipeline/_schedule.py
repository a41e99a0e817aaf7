"""A pipeline schedule is a table: for each rank, the cells that it runs, in order.

A *stage* is a slice of the model; stages are numbered from the input to the loss. A *rank* is a
place along the mesh axis `pp`; it owns one stage or several (its *chunks*), and who owns what is
read off the table. An action is one stage's work on one microbatch: `F` the forward pass, `B` the
whole backward pass, or in its place `I`, the gradient of the input, and later `W`, the gradient of
the weights. A cell is an action, or several that run together, such as the forward pass of one
microbatch with the backward pass of another.

The text form has a line for each rank. Where rank r owns stage r alone, the stage is left out:

    F0 F1 F2 B0 B1 B2        0F0 0F1 3F0 3F1+3B0 ...
    F0 B0 F1 B1 F2 B2        1F0 1F1 2F0 ...

CSV has the layout of torch.distributed.pipelining: a row for each rank, cells like `2F0`,
`(0F3;3B1)OVERLAP_F_B` or `1SEND_F0`, an empty cell for an idle step.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from xform.sharding.pipeline._simulate import Timeline

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
# What torch's tables say about sharded weights: no stage's work, and not on a microbatch.
_WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")

_ACTION = re.compile(rf"(\d*)({'|'.join(MESSAGES + COMPUTE)})(\d+)")
_WEIGHT_ACTION = re.compile(rf"\d+({'|'.join(_WEIGHTS)})\d*")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_IDLE = "."


class Action(NamedTuple):
    """One stage's work on one microbatch, or a message about it.

    Attributes:
      kind: "F", "B", "I" or "W"; or "SEND_F", "RECV_F", "SEND_B", "RECV_B", which a table may
        spell out: what a stage sends on (its output, or the gradient of its input), and what it
        waits for (its input, or the gradient of its output).
      stage: from 0, at the input, on.
      microbatch: from 0 on.

    >>> str(Action("F", 2, 0))
    '2F0'
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"


type Cell = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Which rank does what in which order.

    Attributes:
      rows: for each rank its cells. An entry may be given as an `Action`, as text ("2F0", "F0",
        "0F3+3B1") or as a sequence of these that run together; it is kept as a tuple of actions.
      name: what pictures call it.

    Raises:
      ValueError: lists every entry that is no action.

    >>> schedule = Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]])
    >>> schedule.ranks, schedule.stages, schedule.microbatches
    (2, 2, 2)
    >>> print(schedule)
    F0 F1 B0 B1
    F0 B0 F1 B1
    """

    rows: Sequence[Sequence]
    name: str = field(default="", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "rows", _parse(self.rows, "rank", "step"))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """How many stages there are: one more than the highest that is named."""
        return 1 + max((action.stage for _, _, action in self.actions()), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches there are: one more than the highest that is named."""
        return 1 + max((action.microbatch for _, _, action in self.actions()), default=-1)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that owns each stage: that of most of its actions; -1 where it has none."""
        seen = Counter((action.stage, rank) for rank, _, action in self.actions())
        owners = ((stage, seen[stage, rank], -rank) for stage, rank in seen)
        found = {stage: -rank for stage, _, rank in sorted(owners)}
        return tuple(found.get(stage, -1) for stage in range(self.stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank owns, its chunks, from the input on."""
        owned = [[] for _ in self.rows]
        for stage, rank in enumerate(self.rank_of):
            if rank >= 0:
                owned[rank].append(stage)
        return tuple(map(tuple, owned))

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yields rank, step and action, rank by rank."""
        for rank, row in enumerate(self.rows):
            for step, cell in enumerate(row):
                for action in cell:
                    yield rank, step, action

    def without_messages(self) -> Schedule:
        """The schedule without the messages that its table spells out."""
        if not any(len(action.kind) > 1 for _, _, action in self.actions()):
            return self
        rows = [[[a for a in cell if len(a.kind) == 1] for cell in row] for row in self.rows]
        return Schedule(rows, self.name)

    def __str__(self):
        plain = all(rank == action.stage for rank, _, action in self.actions())
        show = lambda action: str(action)[len(str(action.stage)) :] if plain else str(action)
        rows = ([_IDLE, *map("+".join, (map(show, cell) for cell in row))] for row in self.rows)
        return "\n".join(" ".join(row[1:] or row) for row in rows)

    @classmethod
    def from_text(cls, text: str, name: str = "") -> Schedule:
        """Reads the text form: a line for each rank, `.` for an idle step, `#` before a comment.

        >>> Schedule.from_text("F0 F1 B0 B1 # the first rank").microbatches
        2
        """
        lines = (line.split("#")[0].split() for line in text.splitlines())
        return cls([line for line in lines if line], name)

    @classmethod
    def from_csv(cls, text: str, name: str = "", *, ignore: Iterable[str] = ()) -> Schedule:
        r"""Reads CSV in the layout of torch.distributed.pipelining.

        Args:
          text: the content of the file.
          name: what pictures call it.
          ignore: which of "UNSHARD", "RESHARD" and "REDUCE_GRAD" to leave out. They steer
            weights that are sharded inside a rank, which xform's executors keep in place.

        Raises:
          ValueError: lists every cell that is no action, and those that `ignore` does not name.

        >>> print(Schedule.from_csv("0F0,,0B0\n,1F0,1B0"))
        F0 B0
        F0 B0
        """
        ignored = tuple(ignore)
        if unknown := [kind for kind in ignored if kind not in _WEIGHTS]:
            raise ValueError(f"`ignore={unknown}`: only {', '.join(_WEIGHTS)} can be left out.")

        def keep(cell: str) -> bool:
            match = _WEIGHT_ACTION.fullmatch(cell)
            return match is None or match[1] not in ignored

        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
        rows = [[cell if keep(cell) else "" for cell in row] for row in rows]
        return cls(_parse(rows, "row", "column"), name)

    def to_csv(self) -> str:
        """Returns CSV in the layout of torch.distributed.pipelining.

        >>> print(Schedule([["0F0", "0F1+0B0", "0B1"]]).to_csv(), end="")
        0F0,(0F1;0B0)OVERLAP_F_B,0B1
        """
        together = lambda cell: f"({';'.join(map(str, cell))})OVERLAP_F_B"
        out = io.StringIO()
        rows = (
            [str(cell[0]) if len(cell) == 1 else together(cell) for cell in row]
            for row in self.rows
        )
        # A row of no cells would be a blank line, which means no row: it has one idle step.
        csv.writer(out, lineterminator="\n").writerows([row or [""] for row in rows])
        return out.getvalue()

    @classmethod
    def load(cls, path: str | Path, **options) -> Schedule:
        """Reads a file: CSV where its name ends in `.csv` (`options`: those of `from_csv`)."""
        path = Path(path)
        read = cls.from_csv if path.suffix == ".csv" else cls.from_text
        return read(path.read_text(), path.stem, **options)

    def save(self, path: str | Path) -> None:
        """Writes a file: CSV where its name ends in `.csv`, else the text form."""
        Path(path).write_text(self.to_csv() if Path(path).suffix == ".csv" else f"{self}\n")

    def show(self, *args, **kwargs) -> Timeline:
        """Returns the chart of who works when, which prints and draws itself: `simulate`'s."""
        from xform.sharding.pipeline._simulate import simulate

        return simulate(self, *args, **kwargs)


def _parse(rows: Sequence[Sequence], row_is: str, column_is: str) -> tuple[tuple[Cell, ...], ...]:
    """The rows as cells; idle steps are left out, since only the order means something."""
    wrong, parsed = [], []
    for i, row in enumerate(rows):
        cells = []
        for j, entry in enumerate(row):
            cell = _cell(entry, i)
            if cell is None:
                wrong.append(f"{row_is} {i}, {column_is} {j}: {_complaint(entry)}")
            elif cell:
                cells.append(cell)
        parsed.append(tuple(cells))
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"the schedule has entries that are no actions: {'; '.join(wrong[:10])}{more}."
        )
    return tuple(parsed)


def _cell(entry, rank: int) -> Cell | None:
    """The actions of an entry; None if it is none, () if it is idle."""
    if isinstance(entry, Action):
        known = entry.kind in COMPUTE + MESSAGES and min(entry.stage, entry.microbatch) >= 0
        return (entry,) if known else None
    if isinstance(entry, str):
        entry = entry.strip()
        if entry in ("", _IDLE):
            return ()
        pair = _TOGETHER.fullmatch(entry)
        parts = pair[1].split(";") if pair else entry.split("+")
        matches = [_ACTION.fullmatch(part.strip()) for part in parts]
        if None in matches:
            return None
        return tuple(Action(m[2], int(m[1] or rank), int(m[3])) for m in matches if m)
    if not isinstance(entry, Sequence):
        return None
    cells = [_cell(part, rank) for part in entry]
    return None if None in cells else tuple(action for cell in cells for action in cell or ())


def _complaint(entry) -> str:
    if isinstance(entry, str) and (match := _WEIGHT_ACTION.fullmatch(entry)):
        return (
            f"`{entry}` steers sharded weights, which xform's executors keep in place; to leave it "
            f'out, pass `ignore=["{match[1]}"]`'
        )
    shown = entry if isinstance(entry, str) else repr(entry)
    return f"`{shown}` (write `2F0`: stage, one of F, B, I, W, microbatch; `0F3+3B1` together)"
