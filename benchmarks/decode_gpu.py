"""Decoding on one GPU: one query a text over a long cache, beside PyTorch and cuDNN, in one run.

    export XLA_PYTHON_CLIENT_PREALLOCATE=false           # memory is shared with PyTorch
    python3 benchmarks/decode_gpu.py                     # the table
    python3 benchmarks/decode_gpu.py --only "batch 1,"   # rows whose name contains this

32 query heads, 8 key/value heads, head size 128, bfloat16; every text fills its cache. A step must
read all keys and values, and nothing else of that size, so it can be no faster than memory: the
last column is its rate by what a copy moves in the same run, read and written.

A step goes through several layers with caches of their own, which do not fit into the second-level
cache together, in one program of JAX's or one CUDA graph of PyTorch's: from Python, the launch of a
layer takes as long as the layer. A time is the median over rounds of steps in flight, by layer;
peers take turns. Pages lie in any order; of peers, no one takes pages in a call of its own.
"""

# pyright: reportMissingImports=false
# Peers are no dependencies.

from __future__ import annotations

import argparse
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HEADS, KV_HEADS, SIZE = 32, 8, 128
ROUNDS, MILLISECONDS = 7, 30


@dataclass(frozen=True)
class Row:
    """One row of the table: texts, keys of each, layers, and keys of a page if there are pages."""

    batch: int
    keys: int
    layers: int
    page: int | None = None

    @property
    def name(self) -> str:
        pages = f", pages of {self.page}" if self.page else ""
        return f"batch {self.batch}, {self.keys // 1024}k{pages}"

    @property
    def bytes(self) -> int:
        """Of the keys and values of one layer."""
        return 2 * 2 * self.batch * self.keys * KV_HEADS * SIZE


ROWS = [
    Row(1, 32768, 8), Row(32, 32768, 1), Row(1, 131072, 4),
    Row(1, 32768, 8, 128), Row(1, 32768, 8, 16), Row(32, 32768, 1, 128), Row(32, 32768, 1, 16),
    Row(1, 131072, 4, 128), Row(32, 131072, 1), Row(32, 131072, 1, 128),
]  # fmt: skip


# ---- peers: `peer(row) -> step`, or None where it has no such thing --------------------


@lru_cache(maxsize=1)
def inputs(row: Row):
    """The queries, the caches of all layers, and the page table of all."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 2 * row.layers + 2)
    pages = (row.batch * row.keys // row.page, row.page) if row.page else (row.batch, row.keys)
    normal = jax.jit(partial(jax.random.normal, shape=(*pages, KV_HEADS, SIZE), dtype=jnp.bfloat16))
    q = jax.random.normal(keys[0], (row.batch, 1, HEADS, SIZE), jnp.bfloat16)
    caches = [(normal(k), normal(v)) for k, v in zip(keys[2::2], keys[3::2], strict=True)]
    table = None
    if row.page:
        table = jax.random.permutation(keys[1], pages[0]).reshape(row.batch, -1)
    return q, caches, table


def in_jax(f: Callable, q, caches, *rest) -> Callable:
    """A program of one step."""
    import jax

    run = jax.jit(lambda q, caches, *rest: [f(q, k, v, *rest) for k, v in caches])
    return lambda: run(q, caches, *rest)


def xform(row: Row) -> Callable:
    import jax.numpy as jnp

    from xform import decode_attention, paged_attention

    q, caches, table = inputs(row)
    lengths = jnp.full(row.batch, row.keys)
    if table is None:
        return in_jax(decode_attention, q, caches, lengths)
    return in_jax(paged_attention, q, caches, table, lengths)


def cudnn_jax(row: Row) -> Callable | None:
    import jax
    import jax.numpy as jnp

    if row.page:
        return None
    q, caches, _ = inputs(row)
    lengths = jnp.full(row.batch, row.keys, jnp.int32)

    def attend(q, k, v, one, lengths):
        return jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn",
            query_seq_lengths=one, key_value_seq_lengths=lengths,
        )  # fmt: skip

    return in_jax(attend, q, caches, jnp.ones_like(lengths), lengths)


@lru_cache(maxsize=1)
def torch_inputs(row: Row):
    """The same numbers, `[B,H,S,D]` as PyTorch has them."""
    import jax
    import torch

    q, caches, _ = inputs(row)
    take = lambda x: torch.from_dlpack(jax.block_until_ready(x)).transpose(1, 2).contiguous()
    return take(q), [(take(k), take(v)) for k, v in caches]


def in_torch(f: Callable, q, caches) -> Callable:
    """A CUDA graph of one step."""
    import torch

    step = lambda: [f(q, k, v) for k, v in caches]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay():
        graph.replay()
        return out

    return replay


def sdpa_torch(row: Row, backend: str) -> Callable | None:
    if row.page:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return in_torch(attend, *torch_inputs(row))


def flex_torch(row: Row) -> Callable | None:
    if row.page:
        return None
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    attend = partial(torch.compile(flex_attention, dynamic=False), enable_gqa=True)
    return in_torch(attend, *torch_inputs(row))


PEERS = {
    "xform": xform, "FlexAttention": flex_torch,
    "cuDNN, torch": partial(sdpa_torch, backend="CUDNN_ATTENTION"),
    "flash, torch": partial(sdpa_torch, backend="FLASH_ATTENTION"),
    "cuDNN, JAX": cudnn_jax,
}  # fmt: skip


# ---- the run -------------------------------------------------------------------------------------


def wait(result) -> None:
    if hasattr(result[0], "block_until_ready"):
        result[0].block_until_ready()
        result[-1].block_until_ready()
    else:
        import torch

        torch.cuda.synchronize()


def seconds(call: Callable, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    wait(call())
    return (time.perf_counter() - start) / count


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    x = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    times = [seconds(lambda: [y.copy_(x)], 5) for _ in range(5)]
    del y
    rate = 2 * x.nbytes / median(times)
    del x
    torch.cuda.empty_cache()
    return rate


def error(result, truth) -> float:
    """Of the first layer, relative, in float32."""
    import numpy as np

    first = lambda x: np.asarray(x if hasattr(x, "block_until_ready") else x.float().cpu())
    x, y = (first(r[0]).astype(np.float32).reshape(-1) for r in (result, truth))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def measure(row: Row) -> dict[str, float]:
    """Seconds a layer of every peer that has such a row."""
    calls, truth = {}, None
    for name, peer in PEERS.items():
        try:
            start = time.perf_counter()
            call = peer(row)
            if call is None:
                continue
            result = call()
            wait(result)
            calls[name] = call
            truth = result if name == "xform" else truth
            took, off = time.perf_counter() - start, error(result, truth)
            print(f"# {row.name}: {name} ready in {took:.1f} s, off ours by {off:.1e}", flush=True)
        except Exception as e:
            print(f"# {row.name}: no {name}: {type(e).__name__} {str(e)[:150]}", flush=True)
    counts = {n: max(3, int(MILLISECONDS / 1e3 / seconds(c, 3))) for n, c in calls.items()}
    rounds = [{n: seconds(c, counts[n]) for n, c in calls.items()} for _ in range(ROUNDS)]
    torch_inputs.cache_clear()
    return {name: median(r[name] for r in rounds) / row.layers for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()

    import jax
    import torch

    logging.disable(logging.WARNING)
    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.split("(")[0]
    print(f"{gpu.strip()}, jax {jax.__version__}, torch {torch.__version__}, "
          f"Python {platform.python_version()}")  # fmt: skip
    copy = copy_rate()
    print(f"a copy moves {copy / 1e9:.0f} GB/s", flush=True)
    lines = []
    for row in ROWS:
        if options.only not in row.name:
            continue
        jax.clear_caches()
        for name, took in measure(row).items():
            rate = row.bytes / took
            lines.append(f"| {row.name} | {name} | {1e3 * took:.4f} | {rate / 1e9:.0f} | "
                         f"{rate / copy:.0%} |")  # fmt: skip
            print(lines[-1], flush=True)
    print("\n| one step of one layer | | ms | GB/s | of a copy |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
