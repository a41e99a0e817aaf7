"""Which device has which positions of a split sequence: one permutation for the whole model.

The sequence is cut into chunks of equal length, and each device has equally many of them. Tokens,
labels, document ids and whatever else goes by position are permuted once, before they reach the
devices (`split`), and what a model puts out per position is put back once (`join`). In between,
layers of any mask see positions through `positions` alone. So a layout is chosen for the sum of
what all layers cost:

    contiguous    device i has chunk i: even for full attention, 1 : 2n - 1 under a causal mask
    zigzag        device i has chunks i and 2n - 1 - i: even under a causal mask (Llama 3)
    balanced      chunks are dealt out by what their queries cost, as the masks' block maps say

Chunks are runs of positions, so that a tile inside of one is a range of positions, of which block
maps know as much as of any other: choose chunks that are multiples of the attention's tiles (128).

A layout is a pytree. Its chunks may be traced: a permutation for each batch of documents, made on
the host, is an argument of the compiled step like any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from xform.primitives._rules import join_axes
from xform.sharding.context._deal import deal
from xform.sharding.context._tiles import Load, by_device, tiles_by_chunk

# Chunks of each device, where nobody says: the more, the evener.
_CHUNKS = 16
_TILE = 128


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Layout:
    """Which device has which positions.

    Attributes:
      order: integers `[devices, chunks]`: the chunks of each device, in the order in which it has
        them.
      chunk: how many positions make one.

    >>> layout = zigzag(8, 2)
    >>> layout.order.tolist(), layout.chunk, layout.permutation.tolist()
    ([[0, 3], [1, 2]], 2, [0, 1, 6, 7, 2, 3, 4, 5])
    """

    order: np.ndarray | Array
    chunk: int

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.order.shape[0]

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.order.shape[0] * self.order.shape[1] * self.chunk

    @property
    def known(self) -> bool:
        """Whether the order is known while a program is traced."""
        return isinstance(self.order, np.ndarray)

    @cached_property
    def in_order(self) -> bool:
        """Whether positions are known to lie as they come."""
        return isinstance(self.order, np.ndarray) and bool((np.diff(self.order.ravel()) == 1).all())

    @property
    def permutation(self) -> np.ndarray | Array:
        """The position that stands at each place of the laid-out sequence, `[length]`."""
        return self._positions(self.order)

    def positions(self, axis: str) -> Array:
        """Returns the positions of this device of a mesh axis, `[length / devices]`.

        To be called inside `jax.shard_map`.
        """
        return jnp.asarray(self._positions(self.at(lax.axis_index(axis))))

    def at(self, device: ArrayLike) -> Array:
        """Returns the chunks of one device, `[chunks]`."""
        return lax.dynamic_index_in_dim(jnp.asarray(self.order), device, 0, keepdims=False)

    def split[T](self, tree: T, dim: int = 1) -> T:
        """Returns arrays in the order of the layout, to be split evenly over the mesh axis.

        Args:
          tree: NumPy or JAX arrays of the whole sequence.
          dim: their dimension of positions. Where an explicit mesh axis splits it, the result is
            whole along it, and lies on the mesh as `tree` does along the others.

        >>> zigzag(8, 2).split(np.arange(10, 18)[None]).tolist()
        [[10, 11, 16, 17, 12, 13, 14, 15]]
        """
        return jax.tree.map(lambda x: self._moved(x, dim, back=False), tree)

    def join[T](self, tree: T, dim: int = 1) -> T:
        """Returns arrays in the order of positions: undoes `split`.

        >>> layout = zigzag(8, 2)
        >>> layout.join(layout.split(np.arange(8)[None])).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
        """
        return jax.tree.map(lambda x: self._moved(x, dim, back=True), tree)

    def load(
        self,
        masks: Callable | Sequence[Callable | None] | None,
        *,
        tile: int = _TILE,
        batch: int = 1,
        heads: int = 1,
    ) -> Load:
        """Returns how many tiles each device computes, with the keys of each other one.

        Args:
          masks, batch, heads: as of `balanced`.
          tile: queries and keys of a tile.

        Raises:
          ValueError: the order of chunks, or what a mask reads, is not known.
        """
        if not isinstance(self.order, np.ndarray):
            raise ValueError("the load of a layout that is traced is not known: ask outside of jit")
        each = list(masks) if isinstance(masks, list | tuple) else [masks]
        tiles = _counted(each, self.length, min(tile, self.chunk), self.chunk, batch, heads)
        return Load(by_device(tiles, self.order))

    def _positions(self, chunks):
        space = np if isinstance(chunks, np.ndarray) else jnp
        within = space.arange(self.chunk, dtype=space.int32)
        return (chunks.astype(space.int32).reshape(-1, 1) * self.chunk + within[None]).reshape(-1)

    def _moved(self, x: Any, dim: int, *, back: bool) -> Any:
        dim = dim % x.ndim
        if x.shape[dim] != self.length:
            raise ValueError(
                f"a layout of {self.length} positions got an array of shape {tuple(x.shape)}, with "
                f"{x.shape[dim]} along dimension {dim}: pad the sequence, or name its dimension."
            )
        if self.in_order:
            return x
        if isinstance(x, jax.Array) and any(jax.typeof(x).sharding.spec):
            return self._on_mesh(x, dim, back=back)
        order = self.order.reshape(-1)
        inverse = np.argsort(order) if isinstance(order, np.ndarray) else jnp.argsort(order)
        to, fro = (inverse, order) if back else (order, inverse)
        chunks = x.reshape(*x.shape[:dim], -1, self.chunk, *x.shape[dim + 1 :])
        if isinstance(x, np.ndarray) and isinstance(to, np.ndarray):
            return np.take(chunks, to, axis=dim).reshape(x.shape)
        moved: Any = _permuted(dim, chunks, jnp.asarray(to), jnp.asarray(fro))
        return moved.reshape(x.shape)

    def _on_mesh(self, x: Array, dim: int, *, back: bool) -> Array:
        """`_moved` of an array that explicit axes split, which is made whole along `dim` first."""
        at: Any = x.sharding
        spec = P(*(None if d == dim else axes for d, axes in enumerate(at.spec)))
        x = jax.sharding.reshard(x, NamedSharding(at.mesh, spec))
        moved: Any = partial(self._moved, dim=dim, back=back)
        return jax.shard_map(moved, mesh=at.mesh, in_specs=spec, out_specs=spec)(x)

    def __repr__(self) -> str:
        n, m = self.order.shape
        return f"Layout({n} devices x {m} chunks of {self.chunk})"

    def tree_flatten(self):
        return (self.order,), self.chunk

    @classmethod
    def tree_unflatten(cls, chunk, children):
        (order,) = children
        return cls(order, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permuted(dim: int, x: Array, to: Array, fro: Array) -> Array:
    """`x` at `to` along a dimension, whose derivative is it at `fro`: a look-up, and no scatter."""
    del fro
    return jnp.take(*join_axes((x, to)), axis=dim)


_permuted.defvjp(
    lambda dim, x, to, fro: (_permuted(dim, x, to, fro), (to, fro)),
    lambda dim, saved, ct: (_permuted(dim, ct, *saved[::-1]), None, None),
)


def contiguous(length: int, devices: int) -> Layout:
    """Returns the layout in which device i has the i-th part.

    >>> contiguous(8, 2).permutation.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _check("contiguous", length, devices, 1)
    return Layout(np.arange(devices, dtype=np.int32)[:, None], length // devices)


def zigzag(length: int, devices: int) -> Layout:
    """Returns the layout in which device i has parts i and 2n - 1 - i of 2n.

    Under a causal mask all devices have as much to do, with every other device's keys too.

    >>> zigzag(8, 2).permutation.tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    _check("zigzag", length, devices, 2)
    first = np.arange(devices, dtype=np.int32)
    return Layout(np.stack([first, 2 * devices - 1 - first], 1), length // (2 * devices))


def balanced(
    masks: Callable | Sequence[Callable | None] | None,
    length: int,
    devices: int,
    *,
    chunk: int | None = None,
    tile: int = _TILE,
    batch: int = 1,
    heads: int = 1,
) -> Layout:
    """Returns the layout in which all devices have about as many tiles to compute.

    A chunk costs the tiles that its queries see something of, over all layers, batch entries and
    heads, as block maps say. Chunks are dealt out, the dearest first, to the device that has the
    least so far; then pairs change places while that makes the busiest device less busy, and after
    that while it makes the steps of a ring more even, of which each waits for its busiest device.

    Args:
      masks: the mask of all layers, or one for each layer (a layer that stands there twice counts
        twice); None sees everything. What they read must be known, not traced.
      length: positions of the whole sequence.
      devices: how many devices share it.
      chunk: positions of a chunk, which must divide `length / devices`; by default the largest
        that gives each device 16 of them, and not below a tile, if that divides.
      tile: queries and keys of a tile, as attention has them.
      batch, heads: how many entries and heads there are, for masks that depend on these.

    Raises:
      ValueError: the sizes don't divide, or a mask reads arrays that are not known.

    >>> from xform import causal, documents
    >>> ids = np.repeat(np.arange(3), [300, 500, 224])
    >>> layout = balanced(causal() & documents(ids), 1024, 4, chunk=32)
    >>> layout, layout.load(causal() & documents(ids), tile=32).imbalance < 1.05
    (Layout(4 devices x 8 chunks of 32), True)
    """
    chunk = _chunk(length, devices, tile) if chunk is None else chunk
    _check("balanced", length, devices, 1, chunk)
    each = list(masks) if isinstance(masks, list | tuple) else [masks]
    tiles = _counted(each, length, min(tile, chunk), chunk, batch, heads)
    return Layout(deal(tiles, devices), chunk)


def _counted(masks: Sequence, length: int, tile: int, chunk: int, batch: int, heads: int):
    total = np.zeros((length // chunk,) * 2)
    for mask in masks:
        tiles, known = tiles_by_chunk(mask, length, tile, chunk, batch, heads)
        if not known:
            raise ValueError(
                f"a layout depends on what `{mask!r}` reads, and these arrays are traced: make it "
                "outside of the compiled program, and give the program the layout as an argument."
            )
        total += tiles
    return total


def _chunk(length: int, devices: int, tile: int) -> int:
    part = length // devices if length % devices == 0 else 1
    for count in range(min(_CHUNKS, part), 0, -1):
        if part % count == 0 and (part // count) % tile == 0:
            return part // count
    return max(1, part // _CHUNKS) if part % _CHUNKS == 0 else part


def _check(name: str, length: int, devices: int, parts: int, chunk: int = 1) -> None:
    needed = devices * parts * chunk
    if min(length, devices, chunk) < 1 or length % needed:
        also = f" in chunks of {chunk}" if chunk > 1 else ""
        raise ValueError(
            f"`{name}` can't deal out {length} positions to {devices} devices{also}: needed is a "
            f"multiple of {max(1, needed)}. Pad the sequence, with a document of its own or "
            "ignored labels."
        )
