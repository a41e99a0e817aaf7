"""Logits that are never written: a matrix product for Hopper (sm_90a) whose tiles end in registers.

One kernel, `x = softcap(h w + bias)` tile by tile, with two ends. `sums` leaves of each row of a
tile the largest logit but the label's, the sum of their exponentials relative to it, and the
label's; `weights` leaves the cotangent of each product `h . w`, for some entries of the vocabulary.

A tile is 128 tokens by 256 entries, 64 for each of two warpgroups, which a third one feeds through
a ring of `stages` steps of 64 numbers. Two blocks of a cluster have the same entries: each loads
half of their weights, for both. Blocks stay, and walk all tiles with the same few tokens first, so
that what is loaded is in the cache for the others (the order of the tutorial of Triton's product).

Shapes: h `[T,D]`, w `[D,V]` or `[V,D]`; D, and V where it is last, are multiples of 8 (bulk copies
need rows of 16 bytes). What sticks out of the arrays reads as 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._loss_fn import IGNORED, LossSpec
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import LOG2E, int32, over_rows, tiled
from xform.lowering.mosaic_gpu._ops import OPS
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

_WARPGROUPS, _ROWS = 2, 64
_SIZE = 64  # numbers of a step of the product: 128 bytes, the widest swizzle
_CHUNK = 64  # columns that leave at once


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
      entries: of a tile.
      stages: steps of the product in shared memory.
      cluster: blocks that share their weights, 1 or 2.
      blocks: all of them, as many as an H200 has multiprocessors.
      together: how many groups of tokens, one of a cluster each, are walked side by side.
    """

    entries: int = 256
    stages: int = 4
    cluster: int = 2
    blocks: int = 132
    together: int = 8

    @property
    def tokens(self) -> int:
        """Tokens of one cluster."""
        return _WARPGROUPS * _ROWS * self.cluster


@dataclasses.dataclass(frozen=True)
class Logits:
    """One call.

    Attributes:
      spec: what is computed of a logit.
      tokens, entries, size: T, V and D.
      cut: how the work is cut.
      mma: how products are made.
      count: how many entries are visited.
    """

    spec: LossSpec
    tokens: int
    entries: int
    size: int
    cut: Cut
    mma: Hardware | Twin
    count: int

    @property
    def rows(self) -> int:
        """Tiles along tokens, of a cluster each."""
        return -(-self.tokens // self.cut.tokens)

    @property
    def cols(self) -> int:
        """Tiles along entries."""
        return -(-self.count // self.cut.entries)

    @property
    def steps(self) -> int:
        """Steps of a product."""
        return -(-self.size // _SIZE)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a warpgroup's tile."""
        return _ROWS, self.cut.entries

    def place(self, item) -> tuple[jax.Array, jax.Array]:
        """Row and column of the `item`-th tile: `together` rows at a time, down each column."""
        group = lax.div(item, int32(self.cut.together * self.cols))
        rest = item - group * (self.cut.together * self.cols)
        first = group * self.cut.together
        rows = jnp.minimum(self.cut.together, self.rows - first)
        return first + lax.rem(rest, rows), lax.div(rest, rows)

    def logits(self, acc, bias, n0):
        """From products to logits."""
        if self.spec.biased:
            part = bias.at[plgpu.ds(n0, self.cut.entries)]
            acc = acc + lax.broadcast_in_dim(self.mma.vector(part, 0), self.shape, [1])
        cap = self.spec.softcap
        return acc if cap is None else cap * OPS["tanh"](acc * (1 / cap))


def sums(call: Logits, h, w, bias, labels, *, interpret=None) -> list:
    """The sums of `CrossEntropy` over each tile of entries.

    Args:
      call: what is static.
      h, w: as above.
      bias: float32 `[cols * cut.entries]`, or nothing.
      labels: int32 `[rows * cut.tokens]`, those beyond T anything.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      float32 `[cols, rows * cut.tokens]` each: the largest logit but the label's, the sum of
      exponentials relative to it, the label's logit, and the sum of all where that is asked for.
    """
    shape = (call.cols, call.rows * call.cut.tokens)
    out = [jax.ShapeDtypeStruct(shape, jnp.float32)] * (4 if call.spec.smooth else 3)
    first = jnp.zeros(1, jnp.int32)
    return _run(_Sums(call), out, interpret)(h, w, first, labels, *bias)


def weights(call: Logits, h, w, bias, first, labels, top, cotangents, *, interpret=None):
    """The cotangents of the products of all tokens with `call.count` entries from `first` on.

    Args:
      call, h, w, bias, interpret: as for `sums`.
      first: int32 `[1]`.
      labels, top: int32 and float32 `[rows * cut.tokens]`: what exponentials are relative to.
      cotangents: of the sum of exponentials, of the label's logit, and of the sum of all logits if
        it is asked for; float32 `[rows * cut.tokens]` each.

    Returns:
      `[T,count]`, in the dtype of `h`; 0 for tokens that are ignored.
    """
    out = [jax.ShapeDtypeStruct((call.tokens, call.count), h.dtype)]
    run = _run(_Weights(call), out, interpret)
    return run(h, w, first, labels, *bias, top, *cotangents)[0]


def _run(body: _Product, out: list, interpret) -> Callable:
    cut = body.call.cut
    return plgpu.kernel(
        body.entry,
        out_type=tuple(out),
        grid=(cut.blocks // cut.cluster,),
        grid_names=("group",),
        cluster=(cut.cluster,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=body.name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No shared memory is both read and written by ordinary accesses of one warpgroup.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({"interpret": interpret} if interpret else {}),
    )


@dataclasses.dataclass(frozen=True)
class _Product:
    """The body of the kernel; subclasses say how a tile ends."""

    call: Logits

    name = ""

    def buffers(self) -> dict:
        """Shared memory for the end of a tile."""
        raise NotImplementedError

    def end(self, acc, n0, col, row0, warpgroup, refs, smem) -> None:
        """What becomes of a tile of products.

        Args:
          acc: products, float32 `[64, cut.entries]`.
          n0: its first entry.
          col: its number among those visited.
          row0: its first token.
          warpgroup: whose it is.
          refs: arrays in global memory, after h, w and the first entry.
          smem: shared memory.
        """
        raise NotImplementedError

    def entry(self, h_ref, w_ref, first_ref, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        call, cut = self.call, self.call.cut
        ring = functools.partial(plgpu.Barrier, num_barriers=cut.stages)
        w_shape = (_SIZE, cut.entries) if call.spec.vocab_dim else (cut.entries, _SIZE)
        free = ring(num_arrivals=_WARPGROUPS)
        if cut.cluster > 1:
            free = plgpu.ClusterBarrier(
                collective_axes=("cluster",), num_barriers=cut.stages, num_arrivals=_WARPGROUPS
            )
        scratch = {
            "h": tiled((cut.stages, _WARPGROUPS, _ROWS, _SIZE), call.spec.dtype),
            "w": tiled((cut.stages, *w_shape), call.spec.dtype),
            "acc": call.mma.accumulators(_WARPGROUPS, *call.shape),
            "full": ring(num_arrivals=_WARPGROUPS + 1),
            "free": free,
            **self.buffers(),
        }

        def body(smem):
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.when(warpgroup < _WARPGROUPS)
            def _():
                plgpu.set_max_registers(240, action="increase")
                self._compute(warpgroup, first_ref, refs, smem)

            @plgpu.when(warpgroup == _WARPGROUPS)
            def _():
                plgpu.set_max_registers(24, action="decrease")
                self._load(h_ref, w_ref, first_ref, smem)

        plgpu.run_scoped(body, scratch, collective_axes="warpgroup")

    def _items(self) -> tuple[jax.Array, int]:
        """How many tiles this cluster visits, and the step from each to the next."""
        clusters = self.call.cut.blocks // self.call.cut.cluster
        group = lax.axis_index("group")
        count = self.call.rows * self.call.cols
        return lax.div(count - group + (clusters - 1), int32(clusters)), clusters

    def _token(self, row, warpgroup):
        """The first token of a warpgroup in a tile."""
        block = row * self.call.cut.cluster + lax.axis_index("cluster")
        return (block * _WARPGROUPS + warpgroup) * _ROWS

    def _load(self, h_ref, w_ref, first_ref, smem: dict):
        call, cut = self.call, self.call.cut
        items, clusters = self._items()
        shared = {"collective_axes": "cluster"} if cut.cluster > 1 else {}

        @plgpu.loop(0, items)
        def _(n):
            row, col = call.place(lax.axis_index("group") + n * clusters)
            entries = plgpu.ds(first_ref[0] + col * cut.entries, cut.entries)

            @plgpu.loop(0, call.steps)
            def _(k):
                at = n * call.steps + k
                slot = lax.rem(at, int32(cut.stages))
                full, size = smem["full"].at[slot], plgpu.ds(k * _SIZE, _SIZE)
                plgpu.when(at >= cut.stages)(lambda: plgpu.barrier_wait(smem["free"].at[slot]))
                for warpgroup in range(_WARPGROUPS):
                    tokens = plgpu.ds(self._token(row, warpgroup), _ROWS)
                    plgpu.copy_gmem_to_smem(
                        h_ref.at[tokens, size], smem["h"].at[slot, warpgroup], full
                    )
                source = w_ref.at[(size, entries) if call.spec.vocab_dim else (entries, size)]
                plgpu.copy_gmem_to_smem(source, smem["w"].at[slot], full, **shared)

        # Every phase that ends must be seen, also the last ones.
        total = items * call.steps

        @plgpu.loop(jnp.maximum(total - cut.stages, 0), total)
        def _(at):
            plgpu.barrier_wait(smem["free"].at[lax.rem(at, int32(cut.stages))])

    def _compute(self, warpgroup, first_ref, refs, smem: dict):
        call, cut, mma = self.call, self.call.cut, self.call.mma
        items, clusters = self._items()
        slot_of = lambda at: lax.rem(at, int32(cut.stages))
        operands = lambda slot: (smem["h"].at[slot, warpgroup], smem["w"].at[slot])

        @plgpu.loop(0, items)
        def _(n):
            row, col = call.place(lax.axis_index("group") + n * clusters)

            def product(acc):
                begin = n * call.steps

                def add(at):
                    plgpu.barrier_wait(smem["full"].at[slot_of(at)])
                    mma.add(acc, *operands(slot_of(at)), call.spec.vocab_dim)

                def step(k, carry):
                    add(begin + k)
                    before = slot_of(begin + k - 1)
                    mma.wait_for(1, *operands(before))
                    plgpu.barrier_arrive(smem["free"].at[before])
                    return carry

                add(begin)
                lax.fori_loop(1, call.steps, step, None)
                last = slot_of(begin + call.steps - 1)
                mma.wait_for(0, *operands(last))
                plgpu.barrier_arrive(smem["free"].at[last])
                return acc[...]

            acc = mma.scoped(product, smem["acc"], warpgroup, call.shape)
            n0, row0 = first_ref[0] + col * cut.entries, self._token(row, warpgroup)
            self.end(acc, n0, col, row0, warpgroup, refs, smem)

        plgpu.wait_smem_to_gmem(0)

    def _own(self, n0, row0, labels):
        """Which elements of a tile are the label of their token."""
        call = self.call
        label = call.mma.vector(labels.at[plgpu.ds(row0, _ROWS)], 1)
        index = call.mma.index(n0, call.shape, 1, jnp.int32)
        return index == over_rows(label, call.shape), index, label


class _Sums(_Product):
    """A tile ends in three or four numbers a row."""

    name = "cross_entropy_sums"

    def buffers(self) -> dict:
        count = 4 if self.call.spec.smooth else 3
        return {"results": [plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.float32)] * count}

    def end(self, acc, n0, col, row0, warpgroup, refs, smem):
        call = self.call
        labels, *bias = refs[: 1 + call.spec.biased]
        x = call.logits(acc, *(bias or [None]), n0)
        own, index, _ = self._own(n0, row0, labels)
        rest = jnp.where(own, -jnp.inf, x)
        if call.entries % call.cut.entries:
            inside = index < call.entries
            rest = jnp.where(inside, rest, -jnp.inf)
        top = rest.max(axis=1)
        base = jnp.where(top == -jnp.inf, 0.0, top) * LOG2E
        total = jnp.exp2(rest * LOG2E - over_rows(base, call.shape)).sum(axis=1)
        values = [top, total, jnp.where(own, x, 0.0).sum(axis=1)]
        if call.spec.smooth:
            every = jnp.where(inside, x, 0.0) if call.entries % call.cut.entries else x
            values.append(every.sum(axis=1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        results = refs[1 + call.spec.biased :]
        for value, buffer, ref in zip(values, smem["results"], results, strict=True):
            buffer.at[warpgroup][...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[warpgroup], ref.at[col, plgpu.ds(row0, _ROWS)])


class _Weights(_Product):
    """A tile ends as the cotangents of its products."""

    name = "cross_entropy_weights"

    def buffers(self) -> dict:
        return {"out": tiled((_WARPGROUPS, 2, _ROWS, _CHUNK), self.call.spec.dtype)}

    def end(self, acc, n0, col, row0, warpgroup, refs, smem):
        call = self.call
        labels, *refs = refs
        bias, refs = refs[: call.spec.biased], refs[call.spec.biased :]
        *rows, out_ref = refs
        x = call.logits(acc, *(bias or [None]), n0)
        own, _, label = self._own(n0, row0, labels)
        top, *cotangents = (call.mma.vector(r.at[plgpu.ds(row0, _ROWS)], 1) for r in rows)
        spread = lambda x: over_rows(x, call.shape)
        base = spread(jnp.where(top == -jnp.inf, 0.0, top) * LOG2E)
        ct = jnp.exp2(x * LOG2E - base) * spread(cotangents[0])
        ct = jnp.where(own, spread(cotangents[1]), ct)
        if call.spec.smooth:
            ct = ct + spread(cotangents[2])
        if call.spec.softcap is not None:
            part = x * (1 / call.spec.softcap)
            ct = ct * (1 - part * part)
        # Whatever an ignored token is, NaN included.
        ct = jnp.where(spread(label) == IGNORED, 0.0, ct).astype(call.spec.dtype)
        for n in range(call.cut.entries // _CHUNK):
            buffer = smem["out"].at[warpgroup, n % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = ct[:, n * _CHUNK : (n + 1) * _CHUNK]
            plgpu.commit_smem()
            cols = plgpu.ds(col * call.cut.entries + n * _CHUNK, _CHUNK)
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[plgpu.ds(row0, _ROWS), cols])
