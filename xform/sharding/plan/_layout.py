"""How a model is split over devices, and every reason why it can't be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from xform.sharding.pipeline import BUILDERS
from xform.sharding.plan._machine import Machine
from xform.sharding.plan._messages import Group
from xform.sharding.plan._model import Model
from xform.sharding.plan._precision import PRECISIONS

AXES = ("tp", "cp", "pp", "dp")
"""Innermost first, as they lie on the devices."""


@dataclass(frozen=True)
class Layout:
    """What is split, in what order it runs, and what is kept.

    Attributes:
      dp, tp, cp, pp: devices along each axis.
      microbatches: in how many parts, one after another, the rows of a `dp` rank run.
      schedule: the pipeline's, of `xform.sharding.pipeline.BUILDERS`.
      chunks: stages of a rank (virtual stages), for "interleaved"; ZB-V and DualPipe-V have two.
      zero: what `dp` (with `cp`) splits beside rows: nothing (0), the optimiser's state (1), sums
        of gradients too (2), parameters too, gathered for each pass (3, FSDP).
      sequence: whether `tp` splits positions between blocks.
      recompute: what the backward pass computes once more: "none", the "attention" core (of use
        where attention is "dense"), or the "full" layer.
      attention: "fused", or "dense" with a matrix of scores in memory.
      loss: "fused" with the products before it, which are then made twice, or "dense" with logits
        in memory.
      precision: what is kept in which type, of `PRECISIONS`.
      overlap: axes whose messages run beside what is computed.
      lockstep: whether one program runs all ranks of a pipeline, in ticks (`one_program`).

    >>> Layout(dp=64, tp=8, pp=16).devices
    8192
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    sequence: bool = True
    recompute: Literal["none", "attention", "full"] = "none"
    attention: Literal["fused", "dense"] = "fused"
    loss: Literal["fused", "dense"] = "fused"
    precision: str = "mixed"
    overlap: tuple[str, ...] = ("dp", "pp")
    lockstep: bool = False

    @property
    def devices(self) -> int:
        """How many it is for."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.pp * self.virtual

    @property
    def virtual(self) -> int:
        """Stages of a rank."""
        return 2 if self.schedule in ("zb-v", "dualpipe-v") else self.chunks

    def group(self, axis: str) -> Group:
        """Who talks along an axis. Gradients are summed over "data", which is `dp` and `cp`."""
        if axis == "data":
            # `pp` lies between the two: as many devices to a member, as if members lay evenly.
            return Group(self.dp * self.cp, self.tp * (self.pp if self.dp > 1 else 1))
        stride = 1
        for name in AXES[: AXES.index(axis)]:
            stride *= getattr(self, name)
        return Group(getattr(self, axis), stride)

    def __str__(self):
        sizes = " ".join(f"{axis}{getattr(self, axis)}" for axis in ("dp", "pp", "cp", "tp"))
        virtual = f"×{self.virtual}" if self.virtual > 1 else ""
        pipeline = f" {self.schedule}{virtual}" if self.pp > 1 else ""
        return f"{sizes} m{self.microbatches}{pipeline} zero{self.zero} {self.recompute}"


PLAIN = Layout()


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Returns how many layers each stage has: as even as can be, fewer at the two ends.

    The ends have the embedding and the vocabulary besides, so that what does not divide is left out
    there first: the last stage, the first, the last but one, and so on.

    >>> layers_of_stages(126, 128)[:2], layers_of_stages(126, 128)[-2:]
    ((0, 1), (1, 0))
    >>> layers_of_stages(10, 4)
    (2, 3, 3, 2)
    """
    most = -(-layers // stages)
    counts = [most] * stages
    for i in range(most * stages - layers):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    return tuple(counts)


def reasons_against(
    model: Model, on: Machine, layout: Layout, tokens: int, *, tp_in_node: bool = True
) -> list[str]:
    """Returns in words why a layout can't run; memory is another matter.

    Args:
      model: what is trained.
      on: the machine.
      layout: how it is split.
      tokens: of a batch, over all devices.
      tp_in_node: whether `tp` must stay within a node.

    >>> from xform.sharding.plan import LLAMA_3_405B, machine
    >>> reasons_against(LLAMA_3_405B, machine("H100", 16), Layout(tp=16), tokens=2**20)
    ['tp=16 is more than the 8 devices of a node', 'kv_heads=8 is no multiple of tp=16']
    """
    lay, wrong = layout, []
    numbers = {name: getattr(lay, name) for name in (*AXES, "microbatches", "chunks")}
    wrong += [f"{name}={n!r} must be at least 1" for name, n in numbers.items() if not n >= 1]
    wrong += _unknown(lay)
    if wrong:
        return wrong  # what follows counts with these
    if lay.devices != on.count:
        sizes = " × ".join(f"{axis}={getattr(lay, axis)}" for axis in ("dp", "pp", "cp", "tp"))
        wrong.append(f"{sizes} are {lay.devices} devices, and there are {on.count}")
    if tp_in_node and lay.tp > on.fabric.node:
        wrong.append(f"tp={lay.tp} is more than the {on.fabric.node} devices of a node")
    split = {"heads": model.heads, "kv_heads": model.kv_heads, "hidden": model.hidden}
    wrong += [f"{k}={n} is no multiple of tp={lay.tp}" for k, n in split.items() if n % lay.tp]
    positions, parts = model.length, 2 * lay.cp if lay.cp > 1 else 1
    if positions % parts:
        wrong.append(f"length={positions} is no multiple of {parts}, two parts for each of cp")
    elif lay.sequence and (positions // lay.cp) % lay.tp:
        wrong.append(f"a device's {positions // lay.cp} positions are no multiple of tp={lay.tp}")
    rows, left = divmod(tokens, model.length)
    if left or rows < 1:
        wrong.append(f"tokens={tokens} is no multiple of length={model.length}")
    elif rows % (lay.dp * lay.microbatches):
        wrong.append(
            f"{rows} rows are no multiple of dp={lay.dp} × microbatches={lay.microbatches}"
        )
    return wrong + _of_pipeline(model, lay)


def _unknown(lay: Layout) -> list[str]:
    known = {
        "schedule": tuple(BUILDERS),
        "zero": (0, 1, 2, 3),
        "recompute": ("none", "attention", "full"),
        "attention": ("fused", "dense"),
        "loss": ("fused", "dense"),
        "precision": tuple(PRECISIONS),
    }
    given = asdict(lay)
    wrong = [
        f"{name}={given[name]!r} is none of {', '.join(map(str, choices))}"
        for name, choices in known.items()
        if given[name] not in choices
    ]
    if strange := [axis for axis in lay.overlap if axis not in AXES]:
        wrong.append(f"overlap={strange} names no axis of {', '.join(AXES)}")
    return wrong


def _of_pipeline(model: Model, lay: Layout) -> list[str]:
    wrong = []
    if lay.chunks > 1 and lay.schedule != "interleaved":
        wrong.append(f"chunks={lay.chunks} is of the schedule interleaved, not of {lay.schedule}")
    if lay.pp == 1 and (lay.chunks > 1 or lay.schedule not in ("1f1b", "gpipe")):
        wrong.append(f"schedule={lay.schedule} with chunks={lay.chunks} needs pp above 1")
    # The two ends may have no layer of their own, but for an embedding and a vocabulary.
    if lay.stages > model.layers + 2:
        wrong.append(f"{lay.stages} stages are more than {model.layers} layers and two ends")
    if lay.cp > 1 and lay.attention == "dense":
        wrong.append("attention=dense has no rule for cp: take fused")
    return wrong
