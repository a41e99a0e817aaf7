"""Logits that are never written: how the tiles of `x = softcap(h w + bias)` end.

`sums` leaves of each row of a tile the largest logit but the label's, the sum of exponentials
relative to it, and the label's. `cotangents` leaves those of the products `h . w`, for some entries
of the vocabulary, and `add` adds what these and the weights give hidden states.

Shapes: h `[T,D]`, w `[D,V]` or `[V,D]`; D, and V where it is last, are multiples of
64, all others of 8 (`_loss.misfits`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._loss_fn import IGNORED, LossSpec
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import LOG2E, over_rows, tiled
from xform.lowering.mosaic_gpu._kernel import in_place
from xform.lowering.mosaic_gpu._product import ROWS, WARPGROUPS, Cut, Product, Spot
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

# tanh(x) / x = 1 + y P(y), y = x^2 up to 0.42, with a relative error of 6e-8.
_TANH = (-0.33333322, 0.13332458, -0.053818356, 0.020873327, -0.00594125)
_CHUNK = 64  # columns of a tile that are worked on at once: then no other tile stays in registers


def _tanh(x):
    """To a unit or two in the last place: a loss in float32 shows more than a weight in 16 bits."""
    y = x * x
    near = x + x * (y * functools.reduce(lambda acc, c: acc * y + c, reversed(_TANH)))
    far = 1 - 2 / (1 + jnp.exp2(jnp.abs(x) * (2 * LOG2E)))
    return jnp.where(y < 0.4, near, jnp.where(x < 0, -far, far))


@dataclasses.dataclass(frozen=True)
class Logits:
    """What is static of a call.

    Attributes:
      spec: what is computed of a logit.
      tokens, entries, size: T, V and D.
      cut: how the work is cut.
      mma: how products are made.
    """

    spec: LossSpec
    tokens: int
    entries: int
    size: int
    cut: Cut
    mma: Hardware | Twin

    @property
    def dtypes(self) -> tuple[jnp.dtype, jnp.dtype]:
        """Of both sides of a product."""
        return self.spec.dtype, self.spec.dtype

    def rows(self, x, fill=0):
        """Numbers of tokens as kernels want them, for whole tiles."""
        return jnp.pad(x, (0, -len(x) % self.cut.rows), constant_values=fill)

    def cols(self, x):
        """Numbers of entries likewise, float32."""
        return jnp.pad(x.astype(jnp.float32), (0, -len(x) % self.cut.cols))

    def product(self, count: int, end) -> Product:
        """Of hidden states with some weights."""
        dim = self.spec.vocab_dim
        return Product(
            self.tokens, count, self.size, dim, self.dtypes, self.cut, self.mma, end, dim
        )

    def part(self, acc, bias, spot: Spot, start: int):
        """Some columns of a tile: from products to logits, and their entries."""
        x, first = acc[:, start : start + _CHUNK], spot.first + spot.col + start
        if self.spec.biased:
            part = self.mma.vector(bias[0].at[plgpu.ds(first, _CHUNK)], 0)
            x = x + lax.broadcast_in_dim(part, x.shape, [1])
        cap = self.spec.softcap
        x = x if cap is None else cap * _tanh(x * (1 / cap))
        return x, self.mma.index(first, x.shape, 1, jnp.int32)

    def per_row(self, ref, spot: Spot):
        """A warpgroup's part of numbers of tokens."""
        return self.mma.vector(ref.at[plgpu.ds(spot.row, ROWS)], 1)


def sums(call: Logits, h, w, bias, labels, *, interpret=None) -> list:
    """The sums of `CrossEntropy` over each tile of entries.

    Args:
      call: what is static.
      h, w: as above.
      bias: one of `call.cols`, or nothing.
      labels: int32, of `call.rows`.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      float32 `[tiles of entries, len(labels)]` each: the largest logit but the label's, the sum of
      exponentials relative to it, the label's logit, and the sum of all where that is asked for.
    """
    product = call.product(call.entries, _Sums(call))
    out = [jax.ShapeDtypeStruct((product.col_tiles, len(labels)), jnp.float32)]
    out *= 4 if call.spec.smooth else 3
    return product(out, h, w, jnp.zeros(1, jnp.int32), labels, *bias, interpret=interpret)


def cotangents(
    call: Logits, h, w, bias, first, count: int, labels, top, cts, *, interpret=None
) -> jax.Array:
    """The cotangents of the products of all tokens with `count` entries from `first` on.

    Args:
      call, h, w, bias, labels, interpret: as for `sums`.
      first: int32 `[1]`.
      count: a multiple of 8; entries beyond V have 0.
      top: what exponentials are relative to, of `call.rows`.
      cts: cotangents of the sum of exponentials, of the label's logit, and of the sum of all logits
        if it is asked for; float32, of `call.rows`.

    Returns:
      `[T,count]`, in the dtype of `h`; 0 for tokens that are ignored.
    """
    out = [jax.ShapeDtypeStruct((call.tokens, count), h.dtype)]
    product = call.product(count, _Cotangents(call))
    return product(out, h, w, first, labels, *bias, top, *cts, interpret=interpret)[0]


def add(call: Logits, total, cts, w, first, *, interpret=None) -> jax.Array:
    """`total + cts w'`, float32, with rows and columns of whole tiles.

    Args:
      call, w, first, interpret: as for `cotangents`.
      total: float32 `[rows, cols]`.
      cts: what `cotangents` returned.
    """
    dim = call.spec.vocab_dim
    product = Product(
        len(cts), call.size, cts.shape[1], 1 - dim, call.dtypes, call.cut, call.mma,
        _Added(call), dim,
    )  # fmt: skip
    run = functools.partial(product, [], cts, w, first, interpret=interpret)
    _, (result,) = in_place(run, total)
    return result


@dataclasses.dataclass(frozen=True)
class _Sums:
    """A tile ends in three or four numbers a row."""

    call: Logits
    name = "cross_entropy_sums"

    def buffers(self) -> dict:
        count = 4 if self.call.spec.smooth else 3
        return {"results": [plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * count}

    def __call__(self, acc, spot: Spot, refs, smem: dict) -> None:
        call, biased = self.call, self.call.spec.biased
        label, ragged = call.per_row(refs[0], spot), call.entries % call.cut.cols != 0
        rest, of_label, of_all = [], [], []
        for start in range(0, call.cut.cols, _CHUNK):
            x, index = call.part(acc, refs[1 : 1 + biased], spot, start)
            own, outside = index == over_rows(label, x.shape), index >= call.entries
            of_label.append(jnp.where(own, x, 0.0).sum(axis=1))
            of_all.append((jnp.where(outside, 0.0, x) if ragged else x).sum(axis=1))
            rest.append(jnp.where(own | outside if ragged else own, -jnp.inf, x))
        top = functools.reduce(jnp.maximum, (x.max(axis=1) for x in rest))
        base = jnp.where(top == -jnp.inf, 0.0, top) * LOG2E
        exponentials = (jnp.exp2(x * LOG2E - over_rows(base, x.shape)).sum(axis=1) for x in rest)
        values = [top, sum(exponentials), sum(of_label), sum(of_all)][: len(smem["results"])]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for value, buffer, ref in zip(values, smem["results"], refs[1 + biased :], strict=True):
            buffer.at[spot.warpgroup][...] = value
            plgpu.commit_smem()
            target = ref.at[spot.tile, plgpu.ds(spot.row, ROWS)]
            plgpu.copy_smem_to_gmem(buffer.at[spot.warpgroup], target)


@dataclasses.dataclass(frozen=True)
class _Cotangents:
    """A tile ends as the cotangents of its products."""

    call: Logits
    name = "cross_entropy_cotangents"

    def buffers(self) -> dict:
        return {"out": tiled((WARPGROUPS, 2, ROWS, _CHUNK), self.call.spec.dtype)}

    def __call__(self, acc, spot: Spot, refs, smem: dict) -> None:
        call, biased = self.call, self.call.spec.biased
        bias, (top, *cts, out_ref) = refs[1 : 1 + biased], refs[1 + biased :]
        label, top, *cts = (call.per_row(ref, spot) for ref in (refs[0], top, *cts))
        base = jnp.where(top == -jnp.inf, 0.0, top) * LOG2E
        for start in range(0, call.cut.cols, _CHUNK):
            x, index = call.part(acc, bias, spot, start)
            ct = self._cotangent(x, index, label, base, cts)
            buffer = smem["out"].at[spot.warpgroup, (start // _CHUNK) % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = ct.astype(call.spec.dtype)
            plgpu.commit_smem()
            part = plgpu.ds(spot.row, ROWS), plgpu.ds(spot.col + start, _CHUNK)
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[part])

    def _cotangent(self, x, index, label, base, cts):
        """That of products, where logits are x."""
        cap = self.call.spec.softcap
        spread = lambda row: over_rows(row, x.shape)
        ct = jnp.exp2(x * LOG2E - spread(base)) * spread(cts[0])
        ct = jnp.where(index == spread(label), spread(cts[1]), ct)
        if self.call.spec.smooth:
            ct = ct + spread(cts[2])
        if cap is not None:
            part = x * (1 / cap)
            ct = ct * (1 - part * part)
        # Whatever an ignored token is, NaN included; and nothing beyond the vocabulary.
        nothing = spread(label) == IGNORED
        if self.call.entries % 8:
            nothing = nothing | (index >= self.call.entries)
        return jnp.where(nothing, 0.0, ct)


@dataclasses.dataclass(frozen=True)
class _Added:
    """A tile is added to what is there."""

    call: Logits
    name = "cross_entropy_hidden"

    def buffers(self) -> dict:
        return {"out": tiled((WARPGROUPS, 2, ROWS, _CHUNK // 2), jnp.float32)}

    def __call__(self, acc, spot: Spot, refs, smem: dict) -> None:
        size = _CHUNK // 2
        for start in range(0, self.call.cut.cols, size):
            buffer = smem["out"].at[spot.warpgroup, (start // size) % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = acc[:, start : start + size]
            plgpu.commit_smem()
            part = plgpu.ds(spot.row, ROWS), plgpu.ds(spot.col + start, size)
            self.call.mma.add_to(refs[0].at[part], buffer)
