"""Which implementation of attention runs where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xform.lowering._spec import Spec

IMPLEMENTATIONS = (None, "blockwise", "mosaic_gpu", "reference")


class Device(NamedTuple):
    """What a program is lowered for.

    Attributes:
      platform: "cpu", "cuda", "tpu", ....
      capability: of an NVIDIA GPU, such as "9.0"; None where it is not known.
    """

    platform: str
    capability: str | None = None


class Choice(NamedTuple):
    """An implementation, and why it is the one.

    Attributes:
      name: "blockwise", "mosaic_gpu" or "reference".
      why: one line.
    """

    name: str
    why: str


def choose(
    implementation: str | None, spec: Spec, q_shape: Sequence[int], kv_len: int, v_size: int, *,
    peak: bool, device: Device | None,
) -> Choice:  # fmt: skip
    """Returns what runs.

    Args:
      implementation: what the user asked for.
      spec: the user's program.
      q_shape: `[..., T, H, D]`.
      kv_len, v_size: S and V.
      peak: whether the maximum is asked for, as a result with a derivative.
      device: what the program is lowered for; None if that is not known yet.

    Raises:
      NotImplementedError: if what was asked for by name can't run, with all reasons.
    """
    if implementation in ("blockwise", "reference"):
        return Choice(implementation, "asked for by name")
    from xform.lowering import mosaic_gpu  # only where the choice is not made already

    reasons = mosaic_gpu.misfits(spec, q_shape, kv_len, v_size)
    if device is not None and device.platform != "cuda":
        reasons.insert(0, f"the program is for {device.platform}, not for an NVIDIA GPU")
    elif device is not None and not (device.capability or "9.0").startswith("9."):
        reasons.insert(0, f"the GPU's compute capability is {device.capability}, not 9.0 (Hopper)")
    if peak:
        reasons.append('`aux` asks for "max", whose derivative needs the key of each maximum')
    if not reasons:
        return Choice("mosaic_gpu", "a kernel takes all of it")
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f'`implementation="mosaic_gpu"` can\'t run: {"; ".join(reasons)}. Change that, or '
            "leave the choice open with `implementation=None`: blockwise has no such limits."
        )
    return Choice("blockwise", "no kernel: " + "; ".join(reasons))
