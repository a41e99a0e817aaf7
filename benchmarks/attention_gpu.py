"""Attention on one GPU: `xform.flex_attention` beside cuDNN, tokamax and PyTorch, in one run.

    python3 benchmarks/attention_gpu.py                      # the table, of the forward pass
    python3 benchmarks/attention_gpu.py --backward           # of the backward pass alone
    python3 benchmarks/attention_gpu.py --at-once            # PyTorch compiles all rows beforehand
    python3 benchmarks/attention_gpu.py --json times.json    # and the numbers
    python3 benchmarks/attention_gpu.py --picture times.json # a picture of them, on any machine

One process; a peer that can't be imported is left out, and said so. All get the same random numbers
in their own layout. Peers take turns, so that all meet the same clock and heat: a time is the
median over rounds of calls in flight, wall time by count, which is the time of the device. Block
maps that depend on arrays (documents) are made inside every call of ours; PyTorch's beforehand.

TFLOP/s count the two products, 4·B·T·S·H·D, or five backward, however many are made; half of it
where the mask is causal, whatever a mask spares beyond that: so compare them along a row. Backward,
ours is there twice: as it is by default, the same bits every time, and with any order of addition.
"""

# pyright: reportMissingImports=false
# Peers are no dependencies.

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROUNDS, MILLISECONDS = 9, 25
WINDOW, DOCUMENT, PREFIX, RADIUS, CAP = 1024, 1500, 2048, 6, 30.0
SIDE = 128  # of the image of a neighborhood, 16,384 pixels


@dataclass(frozen=True)
class Row:
    """One row of the table: B, T = S, H, K, D = V, a mask and a score."""

    name: str
    b: int
    t: int
    h: int
    kv: int
    d: int
    mask: str = "causal"
    score: str = ""
    backward: bool = False

    @property
    def flops(self) -> float:
        products = 5 if self.backward else 2
        whole = 1 if self.mask == "full" else 0.5
        return 2 * products * self.b * self.t**2 * self.h * self.d * whole

    @property
    def has_mods(self) -> bool:
        return bool(self.score) or self.mask not in ("full", "causal")


SHAPES = [
    Row("hd128 4k full", 4, 4096, 16, 16, 128, "full"),
    Row("hd128 4k causal", 4, 4096, 16, 16, 128),
    Row("hd128 16k causal", 1, 16384, 16, 16, 128),
    Row("hd64 4k causal", 4, 4096, 32, 32, 64),
    Row("hd256 4k causal", 4, 4096, 8, 8, 256),
    Row("GQA 32/8 8k causal", 2, 8192, 32, 8, 128),
]
MODS = [
    Row(f"hd128 16k {name}", 1, 16384, 16, 16, 128, mask, score)
    for name, mask, score in (
        ("causal + soft cap", "causal", "cap"), ("causal + soft cap, rtol 5e-4", "causal", "near"),
        ("causal + ALiBi", "causal", "alibi"), ("causal + bias table", "causal", "table"),
        ("window 1,024", "window", ""),
        ("documents of 1,500", "documents", ""), ("prefix 2,048", "prefix", ""),
        ("neighborhood 13 x 13", "neighborhood", ""),
    )
]  # fmt: skip


def mask_of(name: str, ids) -> Callable | None:
    """A mask as a function of scalars, for any library; `ids` are the documents of tokens."""
    return {
        "full": None,
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
        "prefix": lambda b, h, q, k: (q >= k) | (k < PREFIX),
        # Two-sided bounds: PyTorch's kernel with `abs` here is miscompiled by CUDA 13.
        "neighborhood": lambda b, h, q, k: (
            (q // SIDE - k // SIDE <= RADIUS) & (k // SIDE - q // SIDE <= RADIUS)
            & (q % SIDE - k % SIDE <= RADIUS) & (k % SIDE - q % SIDE <= RADIUS)
        ),
    }[name]  # fmt: skip


def score_of(name: str, tanh: Callable, slopes, table, length: int) -> Callable | None:
    """A score as a function of scalars, for any library."""
    cap = lambda s, b, h, q, k: CAP * tanh(s / CAP)
    return {
        "": None,
        "cap": cap,
        "near": cap,
        "alibi": lambda s, b, h, q, k: s - slopes[h] * (q - k),
        "table": lambda s, b, h, q, k: s + table[h, q - k + length],
    }[name]


# ---- peers: `peer(row) -> call`, or None where it has no such thing ------------------------------


def jax_inputs(row: Row):
    import jax
    import jax.numpy as jnp

    kq, kk, kv, kt = jax.random.split(jax.random.key(0), 4)
    of = lambda key, h: jax.random.normal(key, (row.b, row.t, h, row.d), jnp.bfloat16)
    slopes = 2.0 ** (-8 * jnp.arange(1, row.h + 1) / row.h)
    table = jax.random.normal(kt, (row.h, 2 * row.t))
    return (of(kq, row.h), of(kk, row.kv), of(kv, row.kv)), slopes, table


def cotangent(row: Row):
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(1), (row.b, row.t, row.h, row.d), jnp.bfloat16)


def in_jax(row: Row, f: Callable, q, k, v, *rest) -> Callable:
    """A call of `f`, or of its derivative by q, k and v at what the forward pass has kept."""
    import jax

    if not row.backward:
        compiled = timed(lambda: jax.jit(f).lower(q, k, v, *rest).compile())
        return lambda: compiled(q, k, v, *rest)
    keep = lambda q, k, v, *rest: jax.vjp(lambda q, k, v: f(q, k, v, *rest), q, k, v)
    _, pull_back = jax.jit(keep)(q, k, v, *rest)
    ct = cotangent(row)
    program = jax.jit(lambda pull_back, ct: pull_back(ct))
    compiled = timed(lambda: program.lower(pull_back, ct).compile())
    return lambda: compiled(pull_back, ct)


def timed[T](make: Callable[[], T]) -> T:
    start = time.perf_counter()
    made = make()
    print(f"#   traced and compiled in {time.perf_counter() - start:.1f} s")
    return made


def xform(row: Row, *, deterministic: bool = True) -> Callable:
    import jax.numpy as jnp

    from xform import flex_attention, scores

    (q, k, v), slopes, table = jax_inputs(row)

    def attend(q, k, v, slopes, table, ids):
        caps = {"cap": scores.softcap(CAP), "near": scores.softcap(CAP, rtol=5e-4)}
        score = caps.get(row.score) or score_of(row.score, jnp.tanh, slopes, table, row.t)
        return flex_attention(
            q, k, v,
            score_mod=score, mask_mod=mask_of(row.mask, ids), deterministic=deterministic,
        )  # fmt: skip

    return in_jax(row, attend, q, k, v, slopes, table, jnp.arange(row.t) // DOCUMENT)


def xform_any_order(row: Row) -> Callable | None:
    return xform(row, deterministic=False) if row.backward else None


def cudnn_jax(row: Row) -> Callable | None:
    import jax

    if row.has_mods:
        return None
    causal = row.mask == "causal"
    f = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    return in_jax(row, f, *jax_inputs(row)[0])


def tokamax(row: Row) -> Callable | None:
    if row.has_mods:
        return None
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):  # a profiler that it imports
        module = types.ModuleType(name)
        vars(module).update(__path__=[], get_kernel_stats_tool=None)
        sys.modules.setdefault(name, module)
    from tokamax import dot_product_attention

    causal = row.mask == "causal"
    f = partial(dot_product_attention, is_causal=causal, implementation="mosaic_gpu")
    return in_jax(row, f, *jax_inputs(row)[0])


def torch_inputs(row: Row):
    import numpy as np
    import torch

    arrays, slopes, table = jax_inputs(row)
    put = lambda a: torch.from_numpy(np.array(a, np.float32)).cuda()
    ours = lambda a: put(a).to(torch.bfloat16).transpose(1, 2).contiguous()
    return [ours(a) for a in arrays], ours(cotangent(row)), put(slopes), put(table)


def in_torch(row: Row, f: Callable, heads, ct) -> Callable:
    """As `in_jax`."""
    import torch

    if not row.backward:
        return lambda: f(*heads)
    heads = [x.requires_grad_() for x in heads]
    out = f(*heads)
    return lambda: torch.autograd.grad(out, heads, ct, retain_graph=True)


def cudnn_torch(row: Row) -> Callable | None:
    if row.has_mods:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                q, k, v, is_causal=row.mask == "causal", enable_gqa=row.h != row.kv
            )

    return in_torch(row, attend, *torch_inputs(row)[:2])


def flex_torch(row: Row) -> Callable:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, ct, slopes, table = torch_inputs(row)
    ids = torch.arange(row.t, device="cuda") // DOCUMENT
    torch._dynamo.reset()  # or it gives up on a function that it has compiled for many masks
    mask, blocks = mask_of(row.mask, ids), None
    if mask is not None:
        blocks = torch.compile(create_block_mask)(mask, None, None, row.t, row.t, device="cuda")
    score = score_of(row.score, torch.tanh, slopes, table, row.t)
    f = torch.compile(flex_attention, dynamic=False)
    attend = partial(f, score_mod=score, block_mask=blocks, enable_gqa=row.h != row.kv)
    return in_torch(row, attend, heads, ct)


PEERS = {
    "xform": xform, "xform, any order": xform_any_order, "cuDNN, JAX": cudnn_jax,
    "tokamax": tokamax, "cuDNN, torch": cudnn_torch, "FlexAttention": flex_torch,
}  # fmt: skip


# ---- the run -------------------------------------------------------------------------------------


def compile_at_once(rows: list[Row], limit: float) -> list[Row]:
    """FlexAttention's kernels into PyTorch's cache on disk: up to three minutes a row otherwise.

    A process a row, and nothing is timed. Returns the rows that have failed, or took more seconds
    than the limit: there it is left out.
    """
    start = time.perf_counter()
    # A pool of PyTorch's compilers for each process would be more of them than there are cores.
    small = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip
    code = "import sys; sys.path.insert(0, sys.argv[1]); import attention_gpu as run; run.once()"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    quiet = subprocess.DEVNULL
    begin = lambda row: subprocess.Popen(
        [*command, json.dumps(asdict(row))], env=small, stdout=quiet, stderr=quiet
    )
    processes = [begin(row) for row in rows]
    missing = []
    for row, process in zip(rows, processes, strict=True):
        try:
            status = process.wait(max(0.0, limit - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            missing.append(row)
    took, made = time.perf_counter() - start, len(rows) - len(missing)
    print(f"# FlexAttention: {made} of {len(rows)} rows compiled in {took:.0f} s", flush=True)
    return missing


def once() -> None:
    """One call of FlexAttention, of the row that the command line ends with."""
    wait(flex_torch(Row(**json.loads(sys.argv[-1])))())


def wait(result) -> None:
    first = result[0] if isinstance(result, tuple) else result
    if hasattr(first, "block_until_ready"):
        first.block_until_ready()
    else:
        import torch

        torch.cuda.synchronize()


def milliseconds(call: Callable, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    wait(call())
    return 1e3 * (time.perf_counter() - start) / count


def error(result, truth) -> float:
    """Of the first head, relative, in float32: of the output, or of the gradient by queries."""
    import numpy as np

    result, truth = (x[0] if isinstance(x, tuple) else x for x in (result, truth))
    if not hasattr(result, "block_until_ready"):
        result = result[:, :1].transpose(1, 2).float().cpu().numpy()
    first = lambda x: np.asarray(x[:1, :2048, :1], np.float32)
    return float(np.linalg.norm(first(result) - first(truth)) / np.linalg.norm(first(truth)))


def measure(row: Row, peers: dict[str, Callable]) -> dict[str, float]:
    """Milliseconds of every peer that has such a row, and says what it has not."""
    calls, truth = {}, None
    for name, peer in peers.items():
        try:
            start = time.perf_counter()
            call = peer(row)
            if call is None:
                continue
            result = call()
            wait(result)
            compiled = time.perf_counter() - start
            calls[name] = call
            truth = result if name == "xform" else truth
            off = error(result, truth)
            print(f"# {row.name}: {name} ready in {compiled:.1f} s, off ours by {off:.1e}")
        except Exception as e:
            print(f"# {row.name}: no {name}: {type(e).__name__} {str(e)[:120]}")
    counts = {name: max(3, int(MILLISECONDS / milliseconds(c, 3))) for name, c in calls.items()}
    rounds = [{n: milliseconds(c, counts[n]) for n, c in calls.items()} for _ in range(ROUNDS)]
    times = {name: median(r[name] for r in rounds) for name in calls}
    print(f"# {row.name}: " + ", ".join(f"{n} {t:.3f} ms" for n, t in times.items()), flush=True)
    return times


def table(rows: list[Row], results: dict[str, dict[str, float]]) -> None:
    print(f"\n| TFLOP/s | {' | '.join(PEERS)} | ratio to the best peer |")
    print("|" + "---|" * (len(PEERS) + 2))
    for row in rows:
        times = results.get(row.name)
        if not times or "xform" not in times:
            continue
        rates = [f"{row.flops / times[n] / 1e9:.0f}" if n in times else "–" for n in PEERS]
        peers = [t for name, t in times.items() if not name.startswith("xform")]
        best = min(peers, default=None)
        ratios = [best / t for n, t in times.items() if best and n.startswith("xform")]
        ratio = " / ".join(f"{x:.2f}" for x in ratios) or "–"
        print(f"| {row.name} | {' | '.join(rates)} | {ratio} |", flush=True)


def picture(path: Path) -> None:
    """Draws bars of the numbers in a file of `--json`, beside it."""
    import matplotlib.pyplot as plt
    import numpy as np

    run = json.loads(path.read_text())
    results, backward = run["milliseconds"], run["backward"]
    rows = [replace(row, backward=backward) for row in (*SHAPES, *MODS) if row.name in results]
    plain = [row for row in rows if not row.has_mods]
    modded = [row for row in rows if row.has_mods and "FlexAttention" in results[row.name]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    seen = [name for name in PEERS if any(name in results[row.name] for row in plain)]
    for n, name in enumerate(seen):
        rates = [row.flops / results[row.name].get(name, np.inf) / 1e9 for row in plain]
        left.bar(np.arange(len(plain)) + 0.16 * (n - 2), rates, 0.16, label=name)
    left.set_xticks(range(len(plain)), [row.name for row in plain], rotation=30, ha="right")
    left.set_ylabel(f"TFLOP/s, bfloat16, {'backward' if backward else 'forward'}")
    left.set_title("Without mods")
    left.margins(y=0.2)
    left.legend(loc="upper center", ncols=3)

    ours = [name for name in seen if name.startswith("xform")]
    for n, name in enumerate(ours):
        ratios = [results[row.name]["FlexAttention"] / results[row.name][name] for row in modded]
        at = np.arange(len(modded)) + 0.4 * n
        bars = right.barh(at, ratios, 0.8 / len(ours), label=name)
        right.bar_label(bars, fmt="%.2f", padding=4)
    right.set_yticks(range(len(modded)), [row.name for row in modded])
    right.invert_yaxis()
    right.margins(x=0.1)
    right.axvline(1, color="black", linewidth=1)
    right.set_xlabel("speed, relative to FlexAttention's")
    right.set_title("With masks and scores of the user's")
    figure.suptitle("Attention on one H200: longer is better")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", default="", help="rows whose name contains one of these parts")
    parser.add_argument("--without", default="", help="peers whose name is one of these")
    parser.add_argument("--backward", action="store_true", help="time the backward pass alone")
    parser.add_argument("--at-once", action="store_true", help="PyTorch compiles all rows first")
    parser.add_argument("--limit", type=float, default=600, help="seconds for that")
    options = parser.parse_args()
    if options.picture:
        return picture(options.picture)

    import jax

    logging.disable(logging.WARNING)
    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.split("(")[0]
    heading = f"{gpu.strip()}, jax {jax.__version__}, Python {platform.python_version()}"
    try:
        import torch

        heading += f", torch {torch.__version__}"
    except ImportError:
        heading += ", no torch"
    print(heading, flush=True)
    results = {}
    rows = [replace(row, backward=options.backward) for row in (*SHAPES, *MODS)]
    rows = [row for row in rows if any(part in row.name for part in options.only.split(","))]
    for name in filter(None, options.without.split(",")):
        del PEERS[name]
    missing = compile_at_once(rows, options.limit) if options.at_once else []
    for row in rows:
        peers = {n: p for n, p in PEERS.items() if row not in missing or p is not flex_torch}
        results[row.name] = measure(row, peers)
        jax.clear_caches()
        if options.json:
            run = {"run": heading, "backward": options.backward, "milliseconds": results}
            options.json.write_text(json.dumps(run))
    return table(rows, results)


if __name__ == "__main__":
    main()
