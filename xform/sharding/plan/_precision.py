"""What is kept in which type: of a parameter, and of what a layer leaves for its backward pass."""

from __future__ import annotations

from typing import NamedTuple

from xform.sharding.pipeline._times import Real


class Stream(NamedTuple):
    """Bytes for a token, per number of each kind.

    Attributes:
      width: a number of the stream between blocks; `tp` splits it where it splits positions.
      opens: a number of the stream as products see it that open a block, gathered over `tp`.
      heads: a number of queries.
      keys: a number of keys, and of values.
      hidden: a feed-forward unit.
      gate: a unit's gate, where there is one.
      rows: a row of the stream, whatever its width.
    """

    width: Real
    opens: Real
    heads: Real
    keys: Real
    hidden: Real
    gate: Real = 0.0
    rows: Real = 0.0


class Precision(NamedTuple):
    """How a program stores things.

    Attributes:
      parameter: bytes of one where it rests.
      optimizer: bytes that only the optimiser reads: moments, and a master copy if there is one.
      gradient: bytes that gradients are summed in.
      sent: bytes that a gradient is sent in.
      gathered: bytes that a parameter is sent in, where it is gathered.
      cast: whether parameters are cast to what products multiply; the copies are kept for the
        backward pass.
      kept: what a layer leaves for its backward pass where nothing is recomputed.
      ring: what it leaves besides where `cp` splits positions.
      stacked: how often that is moved beside: into a stack of all layers and out of it.
      forward, backward: what fused loops read and write.
      kernels: how many run in a layer, forward and backward.
    """

    parameter: int
    optimizer: int
    gradient: int
    sent: int
    gathered: int
    cast: bool
    kept: Stream
    ring: Stream
    stacked: int
    forward: Stream
    backward: Stream
    kernels: tuple[int, int]


# A norm reads x and writes what products read; the sum behind attention reads x and what it adds,
# and writes x and the next normed; that behind the feed-forward block reads two and writes x. RoPE
# reads and writes queries and keys. The gate reads two and writes one. Backward, each value comes
# with its cotangent, and what was cheap is made again.
# bfloat16 parameters beside a float32 master copy; gradients float32 (Llama 3).
_MIXED = Precision(
    2, 12, 4, 4, 2, False,
    # x twice; what products read twice, in parts, gathered again; queries, keys, values and what
    # attention makes; of the units two values, gate and up, or what goes in and what comes out.
    kept=Stream(width=8, opens=0, heads=4, keys=2, hidden=4),
    ring=Stream(0, 0, 0, 0, 0),
    stacked=0,
    forward=Stream(width=18, opens=0, heads=4, keys=2, hidden=4, gate=2),
    backward=Stream(width=36, opens=0, heads=4, keys=2, hidden=8, gate=4),
    kernels=(32, 72),
)  # fmt: skip
PRECISIONS = {
    # bfloat16 policy of `xform.precision` over float32 parameters, as the examples train: the
    # stream is float32. All of it is read off the program compiled for an H200: JAX's derivative of
    # a scan keeps six values of the stream a layer, two of what products read, six of the units,
    # and of attention the queries, the float32 result and the rounded one. They are written as
    # zeros, copied into stacks of all layers, and out again. Around a ring, queries and keys are
    # float32, and the keys that came last are kept too.
    "policy": Precision(
        4, 8, 4, 4, 4, True,
        kept=Stream(width=24, opens=4, heads=8, keys=2, hidden=6, gate=6, rows=16),
        ring=Stream(0, 0, heads=2, keys=6, hidden=0),
        stacked=4,
        forward=Stream(width=26, opens=4, heads=10, keys=8, hidden=4, gate=2),
        backward=Stream(width=32, opens=4, heads=16, keys=10, hidden=9, gate=5),
        kernels=(80, 160),
    ),
    # The same with kernels of `fuse` between products, as the examples train on Hopper: the stream
    # is 16 bits, both norms keep it and what products read, and the gate keeps three values. Loops
    # are read off a stage's programs; of their kernels backward the number is about right.
    "fused": Precision(
        4, 8, 4, 4, 4, True,
        kept=Stream(width=4, opens=4, heads=8, keys=2, hidden=4, gate=2, rows=8),
        ring=Stream(0, 0, heads=2, keys=6, hidden=0),
        stacked=4,
        forward=Stream(width=34, opens=0, heads=14, keys=6, hidden=4, gate=2),
        backward=Stream(width=42, opens=0, heads=22, keys=4, hidden=6, gate=4),
        kernels=(48, 90),
    ),
    "mixed": _MIXED,
    # The same with gradients kept in float32 and sent in 16 bits (Megatron).
    "mixed16": _MIXED._replace(sent=2),
}  # fmt: skip
"""By name."""
