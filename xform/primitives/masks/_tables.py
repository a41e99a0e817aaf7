"""Masks that read arrays: documents, trees, graphs and blocks drawn at random.

Relations of any two positions are stored as bits: 32 keys in one word of a row, so that a graph of
a thousand nodes takes 128 KB.
"""

from collections.abc import Callable
from dataclasses import field

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from xform.primitives._objects import (
    AtLeast,
    are_rows,
    blocks_of,
    is_in_text,
    known,
    misfit,
    not_whole,
    of_batch,
    static,
    variant,
)
from xform.primitives.masks._bands import global_tokens
from xform.primitives.masks._mask import Mask


@variant
class documents(Mask):
    """A query sees the keys of its own document: those of equal id. Ids may come in any order.

    Args:
        ids: integers `[T]`, or `[B,T]` for a batch of packed sequences: the document of each query.
        kv_ids: the documents of the keys, `[S]` or `[B,S]`; None if they are those of the queries.
        padding: the id of what is no document: it sees nothing and nothing sees it. None if every
            id is one.

    Raises:
        ValueError: ids have another number of dimensions.

    >>> mask = documents(jnp.array([7, 7, 2, -1]))
    >>> [[bool(mask(0, 0, q, k)) for k in range(4)] for q in (1, 3)]
    [[True, True, False, False], [False, False, False, False]]
    """

    ids: ArrayLike
    kv_ids: ArrayLike | None = None
    padding: ArrayLike | None = field(default=-1, kw_only=True)

    @classmethod
    def from_offsets(cls, offsets: ArrayLike, length: int, **options) -> "documents":
        """Returns the documents that lie one behind the other, as FlashAttention's `cu_seqlens`.

        Args:
          offsets: ascending integers `[N + 1]`: document n is `offsets[n]:offsets[n + 1]`. What
            lies before the first and behind the last is padding.
          length: how many positions there are; a Python number, since it is the size of the ids.
          **options: as of `documents`.

        >>> documents.from_offsets(jnp.array([0, 2, 5]), 6).ids.tolist()
        [0, 0, 1, 1, 1, -1]
        """
        offsets = jnp.asarray(offsets)
        if offsets.ndim != 1 or not jnp.issubdtype(offsets.dtype, jnp.integer):
            raise ValueError(
                f"`documents.from_offsets(offsets)` is {offsets.dtype}{list(offsets.shape)}; "
                "needed are integers [N + 1], where each document begins and the last one ends: of "
                "lengths, `jnp.append(0, jnp.cumsum(lengths))`."
            )
        length = static("documents.from_offsets(length)", length, least=0)
        ids = jnp.searchsorted(offsets, jnp.arange(length), side="right").astype(jnp.int32) - 1
        return cls(jnp.where(ids < offsets.shape[0] - 1, ids, -1), **options)

    def __call__(self, b, h, q_idx, kv_idx):
        ids = of_batch("documents(ids)", self.ids, b, "T")
        kv_ids = ids if self.kv_ids is None else of_batch("documents(kv_ids)", self.kv_ids, b, "S")
        own = ids(q_idx)
        same = own == kv_ids(kv_idx)
        return same if self.padding is None else same & (own != self.padding)

    def misfits(self, shape):
        wrong = not_whole("documents(ids)", self.ids)
        wrong += misfit("documents(ids)", self.ids, [shape.q], shape.b)
        if self.kv_ids is not None:
            return wrong + misfit("documents(kv_ids)", self.kv_ids, [shape.k], shape.b)
        exact = not any(n is None or isinstance(n, AtLeast) for n in (shape.q, shape.k))
        if exact and shape.q != shape.k:
            wrong.append(
                f"`documents(ids)` takes the ids of {shape.q} queries for those of {shape.k} keys: "
                "give it `kv_ids` too"
            )
            return wrong
        return wrong or misfit("documents(ids)", self.ids, [shape.k], shape.b)


@variant
class graph(Mask):
    """A query sees the keys that a graph joins it to, such as the atoms of a molecule.

    Nodes without an edge, as in a batch of graphs that are padded to one size, see nothing. Tokens
    that see themselves as well are `graph(...) | sliding_window(1)`.

    Args:
        words: the adjacency matrix, 32 keys in a word: uint32 `[T, ceil(S / 32)]` or with a
            leading `B`, bit `k % 32` of `words[q, k // 32]`. `graph.of` and `graph.from_edges`
            make them.

    Raises:
        ValueError: words have another number of dimensions.

    >>> mask = graph.of(jnp.array([[False, True], [False, False]]))
    >>> bool(mask(0, 0, 0, 1)), bool(mask(0, 0, 1, 0)), mask
    (True, False, graph(words: uint32[2,1]))
    """

    words: ArrayLike

    @classmethod
    def of(cls, adjacency: ArrayLike) -> "graph":
        """Returns the graph of a matrix, `[T,S]` or `[B,T,S]`: not 0 where a query sees a key."""
        return cls(_packed(jnp.asarray(adjacency)))

    @classmethod
    def from_edges(cls, senders: ArrayLike, receivers: ArrayLike, nodes: int) -> "graph":
        """Returns a graph in which each receiver sees its senders.

        Args:
          senders, receivers: integers `[E]`, or `[B,E]` for a batch of graphs; edges of a node that
            is negative or not below `nodes` are padding.
          nodes: how many positions a sequence has, a Python number. A byte for each pair of them
            is needed for a while.

        >>> mask = graph.from_edges(jnp.array([0, 1, -1]), jnp.array([2, 2, -1]), 3)
        >>> [bool(mask(0, 0, 2, k)) for k in range(3)]
        [True, True, False]
        """
        nodes = static("graph.from_edges(nodes)", nodes, least=0)
        place = lambda x: jnp.where((x >= 0) & (x < nodes), x, nodes)

        def dense(senders, receivers):
            none = jnp.zeros((nodes, nodes), bool)
            return none.at[place(receivers), place(senders)].set(True, mode="drop")

        senders, receivers = jnp.asarray(senders), jnp.asarray(receivers)
        if senders.shape != receivers.shape or senders.ndim == 0:
            raise ValueError(
                f"`graph.from_edges` has senders {list(senders.shape)} and receivers "
                f"{list(receivers.shape)}; needed are as many, [E] or [B,E]."
            )
        return cls.of(jnp.vectorize(dense, signature="(e),(e)->(n,n)")(senders, receivers))

    def __call__(self, b, h, q_idx, kv_idx):
        words = jnp.asarray(self.words)
        if words.dtype != jnp.uint32:
            raise TypeError(
                f"`graph(words)` has dtype {words.dtype}; it must be uint32, 32 keys in a word: of "
                "a matrix, write `graph.of(matrix)`."
            )
        return _bit(of_batch("graph(words)", words, b, "TW"), q_idx, kv_idx)

    def misfits(self, shape):
        if jnp.result_type(self.words) != jnp.uint32:
            return []  # refused with a better word where the mask is called
        sizes = [shape.q, blocks_of(shape.k, 32)]
        return misfit("graph(words)", self.words, sizes, shape.b)


@variant
class tree(Mask):
    """A token of a tree sees itself, those that lead to it, and what came before the tree.

    Speculative decoding tries many continuations of a text at once: the keys are `context` tokens
    of the text and then the tokens of the tree, which are the queries.

    Args:
        parents: integers `[N]`, or `[B,N]`: which token of the tree each one follows; negative for
            those that follow the text itself.
        context: how many keys come before the tree: a scalar, or `[B]`. Keys behind it are hidden.
        first: the index of the tree's first query: a scalar, or `[B]`. None where a call knows it:
            `flex_attention` has the tree's N queries, so that it is 0, and `decode_attention` and
            `paged_attention` count them from the beginning of their text, so that it is `context`.
            Queries before it are of the text, and see what came before them.

    Raises:
        ValueError: parents have another number of dimensions.

    >>> mask = tree(jnp.array([-1, 0, 0, 1]), context=1)  # 3 follows 1 follows 0
    >>> [[bool(mask(0, 0, q, k)) for k in range(5)] for q in (2, 3)]
    [[True, True, False, True, False], [True, True, True, False, True]]
    """

    parents: ArrayLike
    context: ArrayLike = field(default=0, kw_only=True)
    first: ArrayLike | None = field(default=None, kw_only=True)

    def __call__(self, b, h, q_idx, kv_idx):
        of_batch("tree(parents)", self.parents, b, "N")  # refuses other numbers of dimensions
        nodes = jnp.shape(self.parents)[-1]
        start = of_batch("tree(context)", self.context, b)()
        node = kv_idx - start
        ancestors = of_batch("tree(parents)", _ancestors(jnp.asarray(self.parents)), b, "NW")
        if self.first is None:
            first = start if is_in_text() else 0
        else:
            first = of_batch("tree(first)", self.first, b)()
        row = q_idx - first
        # Row N of the ancestors, which is where others are read, has none.
        leads = (node < nodes) & _bit(ancestors, jnp.maximum(row, 0), jnp.maximum(node, 0))
        if self.first is None and not is_in_text():
            return (node < 0) | leads
        return jnp.where(row < 0, node <= row, (node < 0) | leads)

    def misfits(self, shape):
        alone = self.first is None and are_rows()
        wrong = not_whole("tree(parents)", self.parents)
        wrong += misfit("tree(parents)", self.parents, [shape.q if alone else None], shape.b)
        wrong += misfit("tree(context)", self.context, (), shape.b)
        return wrong + (
            [] if self.first is None else misfit("tree(first)", self.first, (), shape.b)
        )


def _packed(adjacency):
    """Bits `[..., n]` as uint32 words `[..., ceil(n / 32)]`."""
    fill = [(0, 0)] * (adjacency.ndim - 1) + [(0, -adjacency.shape[-1] % 32)]
    bits = jnp.pad(adjacency != 0, fill).reshape(*adjacency.shape[:-1], -1, 32)
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return jnp.sum(bits.astype(jnp.uint32) << place, -1, dtype=jnp.uint32)


def _bit(words: Callable, q_idx, kv_idx):
    """Bit `kv_idx` of row `q_idx`, with `words(row, word)`."""
    shift = jnp.asarray(kv_idx & 31).astype(jnp.uint32)
    return (words(q_idx, kv_idx >> 5) >> shift) & jnp.uint32(1) != 0


def _ancestors(parents):
    """For each node the set of itself and its ancestors, as words: in each step twice as far."""
    if parents.ndim > 1:
        return jax.vmap(_ancestors)(parents)
    n = parents.shape[0]
    above = jnp.where((parents >= 0) & (parents < n), parents, n)
    above = jnp.append(above, n)  # node n leads nowhere
    words = _packed(jnp.eye(n + 1, n, dtype=bool))
    for _ in range(n.bit_length()):
        words, above = words | words[above], above[above]
    return words


# ---- Blocks --------------------------------------------------------------------------------------


@variant
class block_sparse(Mask):
    """A query sees the blocks of keys that a layout gives to its block of queries.

    Args:
        layout: booleans `[N,M]`, or `[H,N,M]` with one for each head: whether the queries of block
            n see the keys of block m.
        size: how many positions make a block; a scalar.

    >>> mask = block_sparse(jnp.array([[False, True], [True, False]]), 4)
    >>> [bool(mask(0, 0, 1, k)) for k in (3, 4)]
    [False, True]
    """

    layout: ArrayLike
    size: ArrayLike

    counts = ("size",)

    def __call__(self, b, h, q_idx, kv_idx):
        layout = jnp.asarray(self.layout)
        if layout.ndim not in (2, 3) or layout.dtype != jnp.bool_:
            raise ValueError(
                f"`block_sparse(layout)` is {layout.dtype}{list(layout.shape)}; it must be "
                "booleans [N,M] or [H,N,M], whether block n of queries sees block m of keys."
            )
        layout = layout[h] if layout.ndim > 2 else layout
        return layout[q_idx // self.size, kv_idx // self.size]

    def misfits(self, shape):
        count = lambda n: blocks_of(n, int(self.size)) if known(self.size) else None
        blocks = [count(shape.q), count(shape.k)]
        wrong = misfit("block_sparse(layout)", self.layout, blocks, shape.h)
        return wrong + super().misfits(shape)


def random_blocks(
    key, queries: int, keys: int, *, size: int, count: ArrayLike, heads: int | None = None
) -> Mask:
    """Returns a mask under which each block of queries sees some blocks of keys drawn at random.

    Args:
      key: a PRNG key.
      queries, keys: how many positions there are, Python numbers as `size` and `heads`.
      size: how many positions make a block.
      count: how many distinct blocks are drawn for each block of queries.
      heads: how many heads draw for themselves; None draws once for all.

    >>> random_blocks(jax.random.key(0), 256, 512, size=64, count=2)
    block_sparse(layout: bool[4,8], 64)
    """
    queries, keys, size = (
        static(f"random_blocks({name})", n, least=least)
        for name, n, least in (("queries", queries, 0), ("keys", keys, 0), ("size", size, 1))
    )
    heads = None if heads is None else static("random_blocks(heads)", heads)
    blocks = (-(-queries // size), -(-keys // size))
    drawn = jax.random.uniform(key, blocks if heads is None else (heads, *blocks))
    rank = jnp.argsort(jnp.argsort(drawn, -1), -1)
    return block_sparse(rank < count, size)


def bigbird(
    key, length: int, *, block: int = 64, window: ArrayLike = 3, random: ArrayLike = 3,
    globals: ArrayLike = 1, heads: int | None = None,
) -> Mask:  # fmt: skip
    """Returns BigBird's mask: a window of blocks, some random blocks, and blocks that all see.

    Zaheer et al., arXiv:2007.14062, whose window counts blocks and is centred; every head may have
    random blocks of its own.

    Args:
      key: a PRNG key.
      length: how many positions there are; it, `block` and `heads` are Python numbers.
      block: how many positions make a block.
      window: how many blocks a query sees around its own, which counts; an odd number.
      random: how many blocks are drawn for each block of queries.
      globals: how many of the first blocks see all and are seen by all.
      heads: how many heads draw blocks of their own; None draws once for all.

    >>> bigbird(jax.random.key(0), 1024)
    global_tokens(64) | block_window(64, 1) | block_sparse(layout: bool[16,16], 64)
    """
    drawn = random_blocks(key, length, length, size=block, count=random, heads=heads)
    reach = jnp.asarray(window) // 2 if not known(window) else window // 2
    return global_tokens(globals * block) | block_window(block, reach) | drawn


@variant
class block_window(Mask):
    """A query sees the blocks at most `reach` away from its own.

    Args:
        size: how many positions make a block; a scalar.
        reach: how many blocks to either side; a scalar.

    >>> [k for k in range(12) if block_window(3, 1)(0, 0, 1, k)]
    [0, 1, 2, 3, 4, 5]
    """

    size: ArrayLike
    reach: ArrayLike

    whole = ("reach",)
    counts = ("size",)

    def __call__(self, b, h, q_idx, kv_idx):
        q, k = q_idx // self.size, kv_idx // self.size
        return jnp.logical_and(k >= q - self.reach, k <= q + self.reach)
