"""Runs that others have published, to hold the planner to.

Of each kind of device one row was used to fit one number, the share of its peak that products keep
up (`Rates.product`); all other rows are held out. Megatron's are whole steps in seconds (arXiv
2205.05198, table 5, and section 6 for 2,240 GPUs): unfused attention, a pipeline that stands still
while it sends, gradients sent in 16 bits. Llama 3's are shares (arXiv 2407.21783, table 4: 43, 41
and 38 % "BF16 MFU"), whose convention the paper does not say; ours counts causal attention by half.
Its layers are interleaved as finely as they can be, which the paper's text and its 126 layers tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xform._show import Table, as_text, page
from xform.sharding.pipeline._times import Real
from xform.sharding.plan._layout import Layout
from xform.sharding.plan._machine import machine
from xform.sharding.plan._model import LLAMA_3_405B, Model
from xform.sharding.plan._plan import Plan, predict


@dataclass(frozen=True)
class Published:
    """A run.

    Attributes:
      model, device, devices, layout, tokens: what ran.
      found: seconds of a step, or the share of peak.
      unit: "s" or "MFU".
      fitted: whether a rate was fitted to it.
    """

    model: Model
    device: str
    devices: int
    layout: Layout
    tokens: int
    found: Real
    unit: str
    fitted: bool = False

    def plan(self) -> Plan:
        """What the planner says of it."""
        on = machine(self.device, self.devices)
        return predict(self.model, on, self.layout, self.tokens, must_fit=False)


_GPT = dict(codes=51_200, length=2048, gated=False, tied=True)
# Layers, width, heads, size of a head; devices, ranks, chunks; microbatches, rows in one; seconds
# of a step with all recomputed, and with attention recomputed and positions split.
_MEGATRON = {
    "22B": (48, 6144, 64, 96, 8, 1, 1, 1, 4, 1.42, 1.10),
    "GPT-3 175B": (96, 12288, 96, 128, 64, 8, 3, 64, 1, 18.13, 13.75),
    "MT-NLG 530B": (105, 20480, 128, 160, 280, 35, 3, 280, 1, 49.05, 37.83),
    "1T": (128, 25600, 160, 160, 512, 64, 1, 512, 1, 94.42, 71.49),
}


def _megatron() -> list[Published]:
    found = []
    for name, (layers, width, heads, size, n, pp, chunks, m, rows, full, less) in _MEGATRON.items():
        model = Model(layers, width, heads, heads, size, 4 * width, name=name, **_GPT)  # pyright: ignore[reportArgumentType]
        how = Layout(
            tp=8, pp=pp, microbatches=m, chunks=chunks, precision="mixed16",
            schedule="interleaved" if chunks > 1 else "1f1b",
            attention="dense", loss="dense", overlap=(),
        )  # fmt: skip
        all_again = replace(how, recompute="full", sequence=False)
        selective = replace(how, recompute="attention")
        tokens = m * rows * model.length
        found += [
            Published(model, "A100", n, all_again, tokens, full, "s"),
            Published(model, "A100", n, selective, tokens, less, "s", name.startswith("GPT-3")),
        ]
        if name == "MT-NLG 530B":
            wide = replace(selective, dp=8)
            found.append(Published(model, "A100", 8 * n, wide, 8 * tokens, 39.15, "s"))
    return found


def _llama() -> list[Published]:
    how = Layout(
        dp=64, tp=8, pp=16, microbatches=32, schedule="interleaved", chunks=8, zero=2, loss="dense"
    )
    wide, long = replace(how, dp=128, microbatches=16), replace(LLAMA_3_405B, length=131_072)
    rows = (
        (LLAMA_3_405B, 8192, how, 0.43, True),
        (LLAMA_3_405B, 16_384, wide, 0.41, False),
        (long, 16_384, replace(wide, dp=8, cp=16), 0.38, False),
    )
    return [Published(m, "H100", n, lay, 2**24, mfu, "MFU", fit) for m, n, lay, mfu, fit in rows]


PUBLISHED: tuple[Published, ...] = (*_llama(), *_megatron())
"""All of them."""


@dataclass(frozen=True, repr=False)
class Checked:
    """What `check_published` returns; it prints as a table.

    Attributes:
      rows: a run, what the planner says of it, and how far off that is, as a share.
    """

    rows: tuple[tuple[Published, Plan, Real], ...]

    @property
    def errors(self) -> tuple[Real, ...]:
        """How far off each is, without sign."""
        return tuple(abs(error) for _, _, error in self.rows)

    @property
    def mean(self) -> Real:
        """The mean error."""
        return sum(self.errors) / len(self.rows)

    def __repr__(self) -> str:
        return "\n".join([self._title(), as_text(self._table())])

    def _repr_html_(self) -> str:
        return page(self._title(), [self._table()], [])

    def _title(self) -> str:
        held = [abs(error) for row, _, error in self.rows if not row.fitted]
        return (
            f"published runs: mean error {self.mean:.1%}, largest {max(self.errors):.1%}; of those "
            f"held out {sum(held) / len(held):.1%}"
        )

    def _table(self) -> Table:
        head = ("run", "GPUs", "length", "recompute", "published", "predicted", "error", "role")

        def cells(row: Published, plan: Plan, error: Real) -> tuple[str, ...]:
            show = (lambda x: f"{x:.1%}") if row.unit == "MFU" else (lambda x: f"{x:.2f} s")
            value = float(plan.mfu) if row.unit == "MFU" else plan.seconds
            return (
                row.model.name, f"{row.devices:,} {row.device}", f"{row.model.length:,}",
                row.layout.recompute, show(row.found), show(value), f"{error:+.1%}",
                "fitted" if row.fitted else "held out",
            )  # fmt: skip

        return Table("", head, [cells(*row) for row in self.rows])


def check_published() -> Checked:
    """Returns the published runs beside what the planner says of them.

    >>> check_published().mean < 0.03  # doctest: +SKIP
    True
    """
    rows = []
    for row in PUBLISHED:
        plan = row.plan()
        value = float(plan.mfu) if row.unit == "MFU" else plan.seconds
        rows.append((row, plan, value / row.found - 1))
    return Checked(tuple(rows))
