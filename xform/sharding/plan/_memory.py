"""What a device of a layout holds at most, part by part.

Kept for the backward pass is, of a layer and a token, what the table of the precision lists; of a
pipeline's rank as often as its schedule has microbatches in flight, which the verifier counts.
Beside it stand parameters, sums of gradients and the optimiser's state, and *workspace*: what
exists for a while, such as a layer that is being recomputed, gathered parameters, logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from xform.sharding.pipeline._times import Real
from xform.sharding.plan._compute import BYTES, bytes_of, kept, tokens_of
from xform.sharding.plan._layout import Layout
from xform.sharding.plan._model import Model
from xform.sharding.plan._precision import PRECISIONS, Stream
from xform.sharding.plan._time import layers_of_rank, parameters_of_rank, stages_of

# Schedules that make backward passes in two parts.
SPLIT = ("zb-h1", "zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest device.

    Attributes:
      parameters: where they rest.
      gradients: their sums.
      optimizer: moments, and a master copy if there is one.
      activations: kept for the backward pass, of all microbatches in flight.
      workspace: what exists for a while.
    """

    parameters: Real
    gradients: Real
    optimizer: Real
    activations: Real
    workspace: Real

    @property
    def total(self) -> Real:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, Real]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def memory(model: Model, layout: Layout, tokens: int, in_flight: tuple[int, ...]) -> Memory:
    """Returns what the fullest device holds.

    Args:
      model: what is trained.
      layout: how it is split.
      tokens: of a batch, over all devices.
      in_flight: of each rank of the pipeline, microbatches that it holds, counted by stage.
    """
    layers = layers_of_rank(model, layout)
    ranks = [
        _of_rank(model, layout, tokens, r, each)
        for r, each in enumerate(zip(layers, in_flight, strict=True))
        # Ranks hold less and less; of equal ones the first and the last have an end besides.
        if r in (0, 1, layout.pp - 1) or layers[r] != layers[r - 1]
    ]
    return max(ranks, key=lambda found: found.total)


def _of_rank(model: Model, layout: Layout, tokens: int, rank: int, each: tuple[int, int]) -> Memory:
    layers, in_flight = each
    how, data = PRECISIONS[layout.precision], layout.group("data").size
    own = layers * model.of_layer / layout.tp
    numbers = parameters_of_rank(model, layout, rank)
    if layout.lockstep:  # one program's ends are on every rank
        numbers = own + sum(model.of_ends) / layout.tp
    share = lambda stage: numbers / (data if layout.zero >= stage else 1)
    n = tokens_of(model, layout, tokens)
    copies = BYTES * layers * sum(p.size for p in model.products) / layout.tp
    casts = how.cast and layout.recompute != "full"
    # Stages of a rank are in flight about as often as each other.
    a_pass = kept(model, layout) * n * layers / layout.virtual
    workspace = _workspace(model, layout, n, layout.stages - 1 in stages_of(layout)[rank])
    crossing = 0
    if layout.lockstep:
        # What a stage keeps is taken out of its slot; sums, that the results are made of; and where
        # they are not made apart, all gradients of a stage, before they are added up.
        split = layout.schedule in SPLIT
        workspace += a_pass + how.gradient * (share(2) + (0 if split else own / layout.virtual))
        outs = BYTES * sum(p.outer for p in model.products) / layout.tp
        crossing = outs * n * layers / layout.virtual if split else 0
    return Memory(
        parameters=how.parameter * share(3),
        gradients=how.gradient * share(2),
        optimizer=how.optimizer * share(1),
        activations=(a_pass + crossing) * in_flight + (copies if casts else 0),
        workspace=workspace,
    )


def _workspace(model: Model, layout: Layout, n: int, last: bool) -> Real:
    """Of a layer on its way back: cotangents of its units and the stream, and what it repeats."""
    again = layout.recompute == "full"
    # Where `tp` splits positions, what is gathered and what is yet to be scattered come besides.
    opens = (20 if again else 12) + (10 if layout.sequence and layout.tp > 1 else 0)
    layer = bytes_of(Stream(0, opens, 0, 0, hidden=10 if again else 8), model, layout) * n
    weights = sum(p.size for p in model.products) / layout.tp
    how = PRECISIONS[layout.precision]
    # Those of this layer, of the next one, and the gradients of both.
    gathered = (2 * how.gathered + 2 * how.gradient) * weights if layout.zero == 3 else 0
    logits = 3 * BYTES * n * model.codes / layout.tp if layout.loss == "dense" and last else 0
    return max(layer + gathered, logits)
