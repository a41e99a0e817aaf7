"""What the block maps of long sequences cost: milliseconds, memory, and tiles of each kind.

    uv run benchmarks/block_maps.py

Each map is built inside `jax.jit`, for one batch entry and one head, in tiles of 128.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from xform.primitives import masks
from xform.primitives._mods import take_apart
from xform.primitives.block_map import block_map

TILE, ROUNDS = 128, 15


def documents(length: int, count: int) -> masks.Mask:
    """So many documents of random lengths, packed."""
    cuts = np.sort(np.random.default_rng(0).choice(length, count - 1, replace=False))
    offsets = jnp.asarray(np.concatenate([[0], cuts, [length]]), jnp.int32)
    return masks.documents.from_offsets(offsets, length)


def cases():
    """Name, length and mask."""
    n = 2**18
    yield "documents", n, documents(n, 512)
    yield "causal documents", n, masks.causal() & documents(n, 512)
    yield "causal documents", 2**20, masks.causal() & documents(2**20, 2048)
    yield "causal", n, masks.causal()
    yield "causal", 2**20, masks.causal()
    yield "sliding window", 2**20, masks.sliding_window(4096)
    yield "strided", 2**16, masks.strided(256)
    yield "bigbird", 2**15, masks.bigbird(jax.random.key(0), 2**15)
    grid, window = (128, 128), 13
    yield "neighborhood", 2**14, masks.neighborhood(grid, window)
    order = masks.tiled(grid, (8, 16))
    yield "neighborhood, tiled", 2**14, masks.neighborhood(grid, window, order=order)


def main() -> None:
    """Prints a table."""
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {ROUNDS} rounds\n")
    print(
        "| mask | tokens | best ms | median ms | temporary MB | map MB | full | partial | empty |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, n, mask in cases():
        mods = take_apart(None, mask, jnp.float32)
        sizes = {"q_len": n, "kv_len": n, "q_tile": TILE, "kv_tile": TILE}
        build = jax.jit(lambda xs, m=mods, s=sizes: block_map(m.mask, xs, b=0, h=0, **s))
        compiled = build.lower(mods.context).compile()
        kinds, seconds = np.asarray(compiled(mods.context)), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            compiled(mods.context).block_until_ready()
            seconds.append(time.perf_counter() - start)
        memory = compiled.memory_analysis()
        assert memory is not None
        empty, some, full = np.bincount(kinds.ravel(), minlength=3)
        ms = f"{1e3 * min(seconds):.2f} | {1e3 * np.median(seconds):.2f}"
        sizes = (memory.temp_size_in_bytes, memory.output_size_in_bytes)
        mb = " | ".join(f"{size / 1e6:.1f}" for size in sizes)
        print(f"| {name} | {n:,} | {ms} | {mb} | {full:,} | {some:,} | {empty:,} |", flush=True)


if __name__ == "__main__":
    main()
