"""Which implementation of attention runs where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from xform.lowering._loss_fn import LossSpec
from xform.lowering._spec import Spec
from xform.lowering._tile_fn import TileFn

IMPLEMENTATIONS = (None, "blockwise", "mosaic_gpu", "reference")


class Device(NamedTuple):
    """What a program is lowered for.

    Attributes:
      platform: "cpu", "cuda", "tpu", ....
      capability: of an NVIDIA GPU, such as "9.0"; None where it is not known.
      kind: what JAX calls it, such as "NVIDIA H200"; None where it is not known.
      counted: whether the program is only counted, in the form that any device runs.
    """

    platform: str
    capability: str | None = None
    kind: str | None = None
    counted: bool = False

    @property
    def misfits(self) -> list[str]:
        """Why it runs no kernel; nothing if it is a Hopper, as far as is known."""
        if self.platform != "cuda":
            return [f"the program is for {self.platform}, not for an NVIDIA GPU"]
        if not (self.capability or "9.0").startswith("9."):
            return [f"the GPU's compute capability is {self.capability}, not 9.0 (Hopper)"]
        return []


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
    if peak:
        reasons.append('`aux` asks for "max", whose derivative needs the key of each maximum')
    return chosen(implementation, reasons, device)


def choose_for_sum(
    implementation: str | None, fn: TileFn, operands: Sequence, device: Device | None
) -> Choice:
    """Returns what evaluates a tile sum of attention, any derivative of it.

    Args:
      implementation: what the user asked for.
      fn: its function.
      operands: of `fn`, arrays or their types.
      device: what the program is lowered for; None if that is not known yet.

    Raises:
      NotImplementedError: if what was asked for by name can't run, with all reasons.
    """
    if implementation in ("blockwise", "reference"):
        return Choice("blockwise", "asked for by name")
    from xform.lowering import mosaic_gpu

    return chosen(implementation, mosaic_gpu.gradient_misfits(fn, operands), device)


def chosen(implementation: str | None, reasons: list[str], device: Device | None) -> Choice:
    """Returns the kernel if nothing is in its way.

    Args:
      implementation: what the user asked for.
      reasons: against it, beside the device.
      device: what the program is lowered for; None if that is not known yet.

    Raises:
      NotImplementedError: if it was asked for by name and can't run, with all reasons.
    """
    reasons = [*(device.misfits if device else ()), *reasons]
    if not reasons:
        return Choice("mosaic_gpu", "a kernel takes all of it")
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f'`implementation="mosaic_gpu"` can\'t run: {"; ".join(reasons)}. Change that, or '
            "leave the choice open with `implementation=None`: blockwise has no such limits."
        )
    return Choice("blockwise", "no kernel: " + "; ".join(reasons))


def by_kernels(
    spec: LossSpec, weight_shape: Sequence[int], tokens: int, device: Device | None, *,
    has: bool = True,
) -> bool:  # fmt: skip
    """Returns whether kernels compute linear cross entropy.

    Args:
      spec: what to compute, and what was asked for.
      weight_shape: `[..., D, V]` or `[..., V, D]`.
      tokens: how many there are.
      device: what the program is lowered for; None if that is not known yet.
      has: whether there is a kernel of this kind.

    Raises:
      NotImplementedError: if they were asked for by name and can't, with all reasons.
    """
    if spec.implementation == "chunked" or (device and device.counted):
        return False
    from xform.lowering.mosaic_gpu import _loss

    reasons = [*(device.misfits if device else ()), *_loss.misfits(spec, weight_shape, tokens)]
    if not has:
        reasons.append("there are first derivatives of hidden states and weights, and no others")
    if reasons and spec.implementation == "mosaic_gpu":
        raise NotImplementedError(
            f'`implementation="mosaic_gpu"` can\'t run: {"; ".join(reasons)}. Change that, or '
            "leave the choice open with `implementation=None`: chunked has no such limits."
        )
    return not reasons


def default_device() -> Device:
    """Returns the device where arrays are put by default."""
    here = jax.devices()[0]
    platform = "cuda" if here.platform == "gpu" else here.platform
    return Device(platform, getattr(here, "compute_capability", None), here.device_kind)
