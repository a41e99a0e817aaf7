"""What a model of llama.py has read so far: keys and values in one piece, or in pages.

Shapes are the suffixes of names, as in llama.py; S are the positions in a cache.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from xform import decode_attention, paged_attention

if TYPE_CHECKING:
    import llama


class Cache(NamedTuple):
    """The keys and values of what was read so far, so that no token is computed twice."""

    k_LBSKD: jax.Array
    v_LBSKD: jax.Array
    length_L: jax.Array
    """How many of the S positions are taken: the same number in every layer."""

    def append(self, k_BTKD, v_BTKD) -> "Cache":
        """Puts keys and values behind those of one layer, which must have room for them."""
        k_BSKD, v_BSKD, length = self
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, length, axis=1)
        return Cache(put(k_BSKD, k_BTKD), put(v_BSKD, v_BTKD), length + k_BTKD.shape[1])

    def attend(self, q_BTHD, mask):
        """Attention of the newest tokens over all that are kept of one layer."""
        return decode_attention(q_BTHD, *self, mask_mod=mask)


class Pages(NamedTuple):
    """The same in pages of N positions, of which rows can have as many as they need."""

    k_LPNKD: jax.Array
    v_LPNKD: jax.Array
    table_LBM: jax.Array
    """The pages of each row: the same in every layer."""
    length_L: jax.Array

    def append(self, k_BTKD, v_BTKD) -> "Pages":
        """Puts keys and values behind those of one layer, whose rows must have pages for them."""
        k_PNKD, v_PNKD, table_BM, length = self
        at_T = length + jnp.arange(k_BTKD.shape[1])
        page_BT, place_T = table_BM[:, at_T // k_PNKD.shape[1]], at_T % k_PNKD.shape[1]
        put = lambda old, new: old.at[page_BT, place_T[None]].set(new)
        return Pages(put(k_PNKD, k_BTKD), put(v_PNKD, v_BTKD), table_BM, length + len(at_T))

    def attend(self, q_BTHD, mask):
        """Attention of the newest tokens over all that are kept of one layer."""
        return paged_attention(q_BTHD, *self, mask_mod=mask)


def empty_cache(
    config: "llama.Config", B: int, S: int, page_size: int | None = None
) -> Cache | Pages:
    """Returns a cache with room for S positions, in one piece or in pages."""
    L, N = config.layers, page_size
    none = jnp.zeros(L, jnp.int32)
    tail = (config.kv_heads, config.head_size)
    if N is None:
        zeros = jnp.zeros((L, B, S, *tail))
        return Cache(zeros, zeros, none)
    M = -(-S // N)
    zeros = jnp.zeros((L, B * M, N, *tail))
    table_BM = jnp.arange(B * M, dtype=jnp.int32).reshape(M, B).T  # rows take turns
    return Pages(zeros, zeros, jnp.tile(table_BM, (L, 1, 1)), none)
