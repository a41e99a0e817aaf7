"""What the passes of one device take: products, attention, what lies between, and messages in it.

Everything is for one microbatch on one device. A product is bound by its FLOPs or its bytes; its
rate falls short of the sustained one where its inner dim is short, or its tiles fill the last wave
of the device's units badly. What is computed element by element is bound by the bytes of fused
loops, which `_precision` lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from xform.sharding.pipeline._times import Real
from xform.sharding.plan._layout import Layout
from xform.sharding.plan._machine import Machine
from xform.sharding.plan._messages import collective, send
from xform.sharding.plan._model import Model, Product
from xform.sharding.plan._precision import PRECISIONS, Precision, Stream

BYTES = 2  # of an activation, bfloat16
TILE = 128  # rows and columns of a product's tile


class Spent(NamedTuple):
    """Seconds, by what they go to.

    Attributes:
      compute: products, attention, and loops between.
      exposed: messages that nothing hides, by axis.
      overhead: gaps between kernels.
    """

    compute: Real = 0.0
    exposed: tuple[tuple[str, Real], ...] = ()
    overhead: Real = 0.0

    @property
    def total(self) -> Real:
        """All of it."""
        return self.compute + sum(s for _, s in self.exposed) + self.overhead

    def plus(self, other: Spent, times: Real = 1.0) -> Spent:
        """This, and so many times the other."""
        exposed = dict(self.exposed)
        for axis, seconds in other.exposed:
            exposed[axis] = exposed.get(axis, 0.0) + times * seconds
        return Spent(
            self.compute + times * other.compute,
            tuple(exposed.items()),
            self.overhead + times * other.overhead,
        )


# Bytes of a score of attention in memory: written by the product, read and written by softmax and
# by dropout with its mask, read by the product.
DENSE = {"F": 6 * BYTES + 1, "B": 8 * BYTES + 1}
# Bytes of a logit that the fused loss moves on its way back, in chunks: what is left of 43.8 ms
# beside three products (benchmarks/RESULTS.md, "Cross entropy on a GPU").
FUSED_LOSS = 12


# Of the scores, the weights and dropout's mask, "dense" attention keeps five bytes a pair (arXiv
# 2205.05198, equation 2).
SCORES = 5


@dataclass(frozen=True)
class Passes:
    """What a stage's parts take on one device, for one microbatch.

    Attributes:
      forward, backward: of a layer; recompute counts as backward.
      first, first_backward: the embedding.
      last, last_backward: the products with the vocabulary, and the loss.
      weights: the share of a backward pass that only makes gradients of weights.
      send: a message to the next rank.
    """

    forward: Spent
    backward: Spent
    first: Spent
    first_backward: Spent
    last: Spent
    last_backward: Spent
    weights: Real
    send: Real


def tokens_of(model: Model, layout: Layout, tokens: int) -> int:
    """Returns how many tokens a device sees of a microbatch: `cp` splits them, `tp` does not."""
    return tokens // (layout.dp * layout.microbatches * layout.cp)


def bytes_of(per: Stream, model: Model, layout: Layout) -> Real:
    """Returns the bytes of a token in a layer, on one device."""
    parts = layout.tp if layout.sequence else 1
    heads, keys = (n * model.head_size for n in (model.heads, 2 * model.kv_heads))
    units = (per.hidden + (per.gate if model.gated else 0)) * model.hidden
    whole = per.width * model.width + per.rows
    split = per.heads * heads + per.keys * keys + units
    return whole / parts + per.opens * model.width + split / layout.tp


def kept(model: Model, layout: Layout) -> Real:
    """Returns the bytes that a device keeps of a layer, for each of its tokens."""
    how = PRECISIONS[layout.precision]
    if layout.recompute == "full":  # what goes into a layer
        return bytes_of(Stream(4 if how.cast else BYTES, 0, 0, 0, 0), model, layout)
    scores = SCORES * model.heads * model.length / layout.tp
    dense = layout.attention == "dense" and layout.recompute == "none"
    ring = bytes_of(how.ring, model, layout) if layout.cp > 1 else 0
    return bytes_of(how.kept, model, layout) + ring + (scores if dense else 0)


def product(m: Real, inner: int, outer: int, on: Machine, dtype: str = "bfloat16") -> Real:
    """Returns the seconds of a product [m, inner] × [inner, outer].

    >>> from xform.sharding.plan import machine
    >>> one = machine("H200", 1)
    >>> round(2 * 8192**3 / product(8192, 8192, 8192, one) / 1e12)  # TFLOP/s
    675
    """
    rates = on.rates
    tiles = math.ceil(m / TILE) * math.ceil(outer / TILE)
    # Half tiles, and products cut along the inner dim, soften the last wave: two a unit.
    waves = 2 * tiles / rates.units
    filled = waves / math.ceil(waves)
    share = rates.product * filled * inner / (inner + rates.fill)
    flops = 2 * m * inner * outer / (on.peak(dtype) * share)
    moved = BYTES * (m * inner + inner * outer + m * outer)
    return max(flops, moved / (on.device.bandwidth * rates.stream))


def passes(model: Model, on: Machine, layout: Layout, tokens: int) -> Passes:
    """Returns what the passes of one device take.

    Args:
      model: what is trained.
      on: the machine.
      layout: how it is split.
      tokens: of a batch, over all devices.
    """
    one = _One(model, on, layout, tokens_of(model, layout, tokens))
    forward, backward = one.layer_forward(), one.layer_backward()
    repeated = {"none": Spent(), "attention": Spent(one.attention("F")), "full": forward}
    backward = backward.plus(repeated[layout.recompute])
    return Passes(
        forward, backward, one.embed("F"), one.embed("B"), one.loss("F"), one.loss("B"),
        min(0.5, one.weight_gradients / backward.total), one.send,
    )  # fmt: skip


@dataclass(frozen=True)
class _One:
    """One device and one microbatch, of which it sees so many tokens."""

    model: Model
    on: Machine
    layout: Layout
    tokens: int

    def layer_forward(self) -> Spent:
        products = self._share * sum(self._product(p.inner, p.outer) for p in self._split)
        loops = self._streams(self._precision.forward) + self._loop(self._cast * self._parameters)
        attention = self.attention("F")
        compute = products + attention + loops
        exposed = self._exposed(
            ("tp", self._of_blocks, products),
            ("cp", self._keys("all-gather", BYTES), attention),
            ("dp", self._gather, compute),
        )
        return Spent(compute, exposed, self._gaps("F"))

    def layer_backward(self) -> Spent:
        products = self.weight_gradients + self._share * sum(
            self._product(p.outer, p.inner) for p in self._split
        )
        attention = self.attention("B")
        # A product's result is read once more to be added up in the gradient's own dtype.
        gradient = self._precision.gradient
        added = 2 * BYTES + gradient * (3 if self.layout.microbatches > 1 else 1)
        loops = self._streams(self._precision.backward) + self._loop(
            (self._cast + added) * self._parameters
        )
        compute = products + attention + loops
        exposed = self._exposed(
            ("tp", self._of_blocks, products),
            ("cp", self._keys("reduce-scatter", 4), attention),
            ("dp", self._gather + self._scatter, compute),
        )
        return Spent(compute, exposed, self._gaps("B"))

    @property
    def weight_gradients(self) -> Real:
        """Of a layer: products of what went in and the cotangent of what came out."""
        each = (product(p.inner, self.tokens, p.outer, self.on) for p in self._split)
        return self._share * sum(each)

    def attention(self, kind: str) -> Real:
        """The core of attention: two products forward, five backward of which one is a repeat."""
        m, lay, on = self.model, self.layout, self.on
        heads, keys = m.heads / lay.tp, m.length
        if lay.attention == "dense":
            one = product(keys, m.head_size, keys, on) * self.tokens / keys * heads
            moved = DENSE[kind] * self.tokens * keys * heads
            return (2 if kind == "F" else 4) * one + self._loop(moved)
        pairs = self.tokens * keys / 2
        forward, backward = on.rates.attention
        flops = 4 * pairs * m.head_size * heads
        if kind == "F":
            return flops / (on.peak() * forward)
        return 2.5 * flops / (on.peak() * backward)

    def embed(self, kind: str) -> Spent:
        """A row of the table for each token; backward they are added to it, in float32."""
        rows = 2 * BYTES * self.tokens * self.model.width / self._parts
        messages = (("tp", self._blocks(1)),)
        return Spent(self._loop(rows * (1 if kind == "F" else 4)), messages)

    def loss(self, kind: str) -> Spent:
        """The products with the vocabulary, and what is made of them."""
        lay, p = self.layout, self.model.unembedding.on(self.layout.tp)
        forward = self._product(p.inner, p.outer)
        both = self._product(p.outer, p.inner) + product(p.inner, self.tokens, p.outer, self.on)
        logits = self.tokens * p.outer
        # Written in 16 bits, read for their maximum and sum; read and written as cotangents.
        dense = {"F": 3 * BYTES * logits, "B": 3 * BYTES * logits}
        weights = (4 + 2 * BYTES) * p.size if kind == "B" else self._cast * p.size
        messages = (("tp", self._blocks(1)),)
        if lay.loss == "dense":
            seconds = (forward if kind == "F" else both) + self._loop(dense[kind] + weights)
            return Spent(seconds, messages)
        if kind == "F":
            return Spent(forward + self._loop(weights), messages)
        return Spent(forward + both + self._loop(weights + FUSED_LOSS * logits), messages)

    @property
    def send(self) -> Real:
        """A message to the next rank: each device of `tp` sends a part, gathered where it arrives.

        (arXiv 2104.04473, section 4.1; where `tp` splits positions, there is nothing to gather.)
        """
        if self.layout.pp == 1:
            return 0.0
        whole = BYTES * self.tokens * self.model.width
        gathered = 0.0 if self.layout.sequence else self._collective("all-gather", whole, "tp")
        return gathered + send(whole / self.layout.tp, self.layout.group("pp").stride, self.on)

    # ---- parts --------------------------------------------------------------------------------

    @property
    def _precision(self) -> Precision:
        return PRECISIONS[self.layout.precision]

    @property
    def _share(self) -> Real:
        return self.model.products_share

    @property
    def _split(self) -> list[Product]:
        return [p.on(self.layout.tp) for p in self.model.products]

    @property
    def _parameters(self) -> int:
        return sum(p.size for p in self._split)

    @property
    def _cast(self) -> int:
        """Bytes of a parameter that is cast before its use."""
        state = self._precision
        return state.parameter + BYTES if state.cast else 0

    @property
    def _parts(self) -> int:
        """In how many parts `tp` splits what lies between blocks."""
        return self.layout.tp if self.layout.sequence else 1

    def _product(self, inner: int, outer: int) -> Real:
        return product(self.tokens, inner, outer, self.on)

    def _loop(self, nbytes: Real) -> Real:
        return nbytes / (self.on.device.bandwidth * self.on.rates.stream)

    def _streams(self, per: Stream) -> Real:
        moved = bytes_of(per, self.model, self.layout)
        moved += self._precision.stacked / 2 * kept(self.model, self.layout)
        return self._loop(self.tokens * moved)

    def _gaps(self, kind: str) -> Real:
        return self._precision.kernels[kind == "B"] * self.on.rates.launch

    def _blocks(self, pairs: Real) -> Real:
        """A gather and a scatter of positions, so often; all-reduces send as much."""
        nbytes = BYTES * self.tokens * self.model.width
        return 2 * pairs * self._collective("all-gather", nbytes, "tp")

    @property
    def _of_blocks(self) -> Real:
        """Both blocks of a layer: each opens with a gather and closes with a scatter."""
        return self._blocks(2)

    def _keys(self, kind: str, each: int) -> Real:
        """Keys and values of a whole row; their gradients go back in float32."""
        m, lay = self.model, self.layout
        numbers = 2 * self.tokens * lay.cp * m.kv_heads * m.head_size / lay.tp
        return self._collective(kind, each * numbers, "cp")

    @property
    def _gather(self) -> Real:
        if self.layout.zero < 3:
            return 0.0
        return self._collective("all-gather", self._precision.gathered * self._parameters, "data")

    @property
    def _scatter(self) -> Real:
        if self.layout.zero < 3:
            return 0.0
        sent = self._precision.sent
        return self._collective("reduce-scatter", sent * self._parameters, "data")

    def _collective(self, kind: str, nbytes: Real, axis: str) -> Real:
        return collective(kind, nbytes, self.layout.group(axis), self.on)

    def _exposed(self, *messages: tuple[str, Real, Real]) -> tuple[tuple[str, Real], ...]:
        """What is left of messages: axis, seconds, and the work that the layout may hide them in.

        What is hidden runs beside each other too, so that of their rests the longest is left.
        """
        hidden = [m for m in messages if m[0] in self.layout.overlap]
        shown = [
            (axis, seconds) for axis, seconds, _ in messages if axis not in self.layout.overlap
        ]
        rests = [(axis, max(0.0, seconds - work)) for axis, seconds, work in hidden]
        return (*shown, *sorted(rests, key=lambda rest: rest[1])[-1:])
