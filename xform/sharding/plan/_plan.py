"""`predict`: what one layout costs, or every reason why it can't run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xform._roofline import Utilisation
from xform._show import Table, as_text, page, si
from xform.sharding.pipeline._times import Real
from xform.sharding.plan._faults import FAULTS, Faults
from xform.sharding.plan._layout import Layout, reasons_against
from xform.sharding.plan._machine import Machine
from xform.sharding.plan._memory import Memory, memory
from xform.sharding.plan._model import Model
from xform.sharding.plan._time import Step, step


@dataclass(frozen=True, repr=False)
class Plan:
    """What `predict` returns. It prints as a table, shows itself in notebooks, and can `plot`.

    Attributes:
      model, machine, layout: what of.
      tokens: of a batch, over all devices.
      step: seconds of a step, by what they go to.
      memory: bytes of the fullest device, part by part.
      bubble: the share of the time in which the pipeline's ranks wait, as the simulator says.
      in_flight: of each of its ranks, microbatches held, counted by stage.
      faults: how often devices fail.
    """

    model: Model
    machine: Machine
    layout: Layout
    tokens: int
    step: Step
    memory: Memory
    bubble: Real
    in_flight: tuple[int, ...] = field(repr=False)
    faults: Faults = FAULTS

    @property
    def seconds(self) -> Real:
        """Of a step."""
        return self.step.seconds

    @property
    def tokens_per_second(self) -> Real:
        """Of all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> Utilisation:
        """The share of the devices' peak that the model's own FLOPs are."""
        flops = self.model.flops_per_token * self.tokens / self.machine.count
        share = flops / self.seconds / self.machine.peak()
        what = "model FLOPs: products, no recompute, causal attention half"
        return Utilisation(share, "MFU", f"{what}; of {self.machine.device.name}'s dense peak")

    @property
    def goodput(self) -> Real:
        """The share of the time in which steps are done that stay done."""
        return self.faults.goodput(self.machine.count)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.memory.total <= self.machine.memory

    def record(self) -> dict[str, Any]:
        """Everything as one flat dict of numbers and text."""
        lay = self.layout
        axes = {axis: getattr(lay, axis) for axis in ("dp", "pp", "cp", "tp")}
        return {
            "model": self.model.name,
            "device": self.machine.device.name,
            "devices": self.machine.count,
            "tokens": self.tokens,
            **axes,
            "schedule": lay.schedule if lay.pp > 1 else "",
            "chunks": lay.virtual,
            "microbatches": lay.microbatches,
            "zero": lay.zero,
            "recompute": lay.recompute,
            "seconds": self.seconds,
            **{f"{k}_seconds": v for k, v in self.step.parts.items()},
            **{f"exposed_{k}_seconds": v for k, v in self.step.exposed.items()},
            "mfu": float(self.mfu),
            "tokens_per_second": self.tokens_per_second,
            "goodput": self.goodput,
            **{f"{k}_bytes": v for k, v in self.memory.parts.items()},
            "memory_bytes": self.memory.total,
            "fits": self.fits,
        }

    def plot(self, ax: Any = None) -> Any:
        """Draws where the time of a step goes by matplotlib, and returns the axes."""
        from xform.sharding.plan._plot import bars

        return bars([self], ax)

    def __repr__(self) -> str:
        return "\n".join([self._title(), *map(as_text, self._tables()), *self._notes()])

    def _repr_html_(self) -> str:
        return page(self._title(), self._tables(), self._notes())

    def _title(self) -> str:
        on = f"{self.machine.count:,} × {self.machine.device.name}"
        return (
            f"{self.model.name or 'model'} on {on}, {si(self.tokens)}tokens a step: {self.layout}"
        )

    def _tables(self) -> list[Table]:
        of_step = [
            (f"{1e3 * s:,.1f}", f"{s / self.seconds:.1%}", name)
            for name, s in self.step.parts.items()
        ]
        of_step += [
            (f"{1e3 * s:,.1f}", f"{s / self.seconds:.1%}", f"  of it over {axis}")
            for axis, s in self.step.exposed.items()
        ]
        title = f"A step: {self.seconds:.3f} s, {self.mfu.name} {self.mfu:.1%}"
        total = self.memory.total
        of_memory = [
            (f"{b / 2**30:,.2f}", f"{b / total:.1%}", name) for name, b in self.memory.parts.items()
        ]
        has = self.machine.memory / 2**30
        needs = f"Memory: {total / 2**30:,.1f} GiB of {has:,.1f} GiB on the fullest device"
        return [
            Table(title, ("ms", "share", "for"), of_step),
            Table(needs, ("GiB", "share", "for"), of_memory),
        ]

    def _notes(self) -> list[str]:
        f, n = self.faults, self.machine.count
        return [
            f"faults: one in {f.mtbf(n) / 3600:.2f} h; a checkpoint each {f.interval(n):,.0f} s of "
            f"work; goodput {self.goodput:.1%}",
            self.mfu.convention,
        ]


def predict(
    model: Model,
    machine: Machine,
    layout: Layout,
    tokens: int,
    *,
    faults: Faults = FAULTS,
    must_fit: bool = True,
) -> Plan:
    """Returns what a layout costs.

    Args:
      model: what is trained.
      machine: on what.
      layout: how it is split.
      tokens: of a batch, over all devices.
      faults: how often devices fail.
      must_fit: whether more memory than a device has is an error.

    Raises:
      ValueError: lists every reason why the layout can't run; where there is no other, that it
        needs too much memory, part by part.

    >>> from xform.sharding.plan import LLAMA_3_405B, Layout
    >>> from xform.sharding.plan import machine as machine_of
    >>> interleaved = dict(pp=16, microbatches=32, schedule="interleaved", chunks=8)
    >>> split = Layout(dp=64, tp=8, zero=2, **interleaved)
    >>> plan = predict(LLAMA_3_405B, machine_of("H100", 8192), split, tokens=2**24)
    >>> round(float(plan.mfu), 2)
    0.43
    """
    wrong = reasons_against(model, machine, layout, tokens)
    if wrong:
        raise ValueError(f"`predict` can't run {layout}: {'; '.join(wrong)}.")
    seconds, found = step(model, machine, layout, tokens)
    needs = memory(model, layout, tokens, found.in_flight)
    plan = Plan(
        model, machine, layout, tokens, seconds, needs, found.bubble, found.in_flight, faults
    )
    if must_fit and not plan.fits:
        parts = ", ".join(f"{name} {b / 2**30:.1f}" for name, b in needs.parts.items())
        raise ValueError(
            f"`predict`: {layout} needs {needs.total / 2**30:.1f} GiB on the fullest device, of "
            f"{machine.memory / 2**30:.1f} that a program may have: {parts} GiB. Split more "
            "(tp, pp, zero), recompute more, or make microbatches smaller; `must_fit=False` shows "
            "the plan all the same."
        )
    return plan
