"""Context parallelism on two GPUs beside one: each method, causal and documents, long sequences.

    python3 benchmarks/context_gpu.py                        # 32k, 64k and 128k tokens on 2 GPUs
    python3 benchmarks/context_gpu.py --lengths 131072       # one of them
    python3 benchmarks/context_gpu.py --json times.json      # and the numbers
    python3 benchmarks/context_gpu.py --tiny                 # small ones, on virtual CPU devices
    python3 benchmarks/scaling_gpu.py --only context         # 128k on as many GPUs as there are

One process. A row is a length and a mask: bfloat16, 16 query and 8 key/value heads of 128. All run
on the same random numbers: one GPU in the order of positions, the methods in the order of the
layout, zigzag under the causal mask, and balanced by the block map where documents are packed.
Every method's output and gradients are compared with those of one GPU, relative to their size.
Forward, and forward with backward, are programs of their own; those of a row are compiled side by
side, and then take turns: a time is the median over rounds, wall time by count of calls in flight.
What a row is predicted to cost, `context.which` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

METHODS = ("ring", "all_gather", "ulysses")
MASKS = ("causal", "documents")
PASSES = ("forward", "both")
ROUNDS, MILLISECONDS = 3, 120


@dataclass(frozen=True)
class Row:
    """A length and a mask, with the sizes of heads; documents are an eighth of it on average."""

    length: int
    mask: str
    heads: int = 16
    kv_heads: int = 8
    size: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.length // 1024}k {self.mask}"


TINY = Row(1024, "causal", heads=4, kv_heads=2, size=16)


def ids_of(row: Row):
    """The document of each token: lengths that differ by much, as those of texts do."""
    import numpy as np

    rng = np.random.default_rng(row.length)
    lengths = rng.exponential(row.length / 8, 64).astype(int) + 1
    return np.searchsorted(np.cumsum(lengths), np.arange(row.length), side="right").astype(np.int32)


def mask_of(row: Row, ids):
    from xform import causal, documents

    return causal() & documents(ids) if row.mask == "documents" else causal()


def layout_of(row: Row, devices: int):
    from xform.sharding import context

    if row.mask == "causal":
        return context.zigzag(row.length, devices)
    return context.balanced(mask_of(row, ids_of(row)), row.length, devices)


def inputs_of(row: Row) -> list:
    """Queries, keys, values and the cotangent of the output."""
    import jax

    keys = jax.random.split(jax.random.key(0), 4)
    heads = (row.heads, row.kv_heads, row.kv_heads, row.heads)
    draw = lambda key, h: jax.random.normal(key, (1, row.length, h, row.size), row.dtype)
    return [draw(*x) for x in zip(keys, heads, strict=True)]


def with_pass(attend: Callable, which: str) -> Callable:
    """The output alone, or with the gradients that a cotangent gives."""
    import jax

    def both(q, k, v, d_out, ids):
        out, back = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
        return out, *back(d_out)

    return both if which == "both" else lambda q, k, v, d_out, ids: (attend(q, k, v, ids),)


# ---- programs ------------------------------------------------------------------------------------


def on_one(row: Row, which: str) -> Any:
    """The program of one device."""
    import jax

    from xform import flex_attention

    attend = lambda q, k, v, ids: flex_attention(q, k, v, mask_mod=mask_of(row, ids))
    return jax.jit(with_pass(attend, which))


def on_several(row: Row, which: str, method: Any, layout, mesh) -> Any:
    """The program of a method; ids are whole on all devices, in the order of positions."""
    import jax

    from xform.sharding import context

    P = jax.P

    def attend(q, k, v, ids):
        return context.attention(
            q, k, v, axis="cp", method=method, layout=layout, mask_mod=mask_of(row, ids)
        )

    parts = P(None, "cp")
    outs = (parts,) * (4 if which == "both" else 1)
    f = with_pass(attend, which)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(*[parts] * 4, P()), out_specs=outs))


def calls_of(row: Row, layout, mesh) -> dict[tuple[str, str], Callable[[], Any]]:
    """All programs of a row, compiled side by side; one that fails is left out, and says so."""
    import jax

    from xform.sharding import shardings

    P = jax.P
    inputs, ids = inputs_of(row), ids_of(row)
    first = mesh.devices.flat[0]
    alone = jax.device_put([*inputs, ids], first)
    split = [layout.split(x) for x in inputs]
    split = jax.device_put([*split, ids], shardings(mesh, [*[P(None, "cp")] * 4, P()]))

    def compiled(name: str, which: str):
        start = time.perf_counter()
        try:
            if name == "one":
                f, args = on_one(row, which), alone
            else:
                f, args = on_several(row, which, name, layout, mesh), split
            call = partial(f.lower(*args).compile(), *args)
        except Exception:
            print(f"# {row.name}: no {name}, {which}: {traceback.format_exc(limit=-3)}", flush=True)
            return None
        return call, time.perf_counter() - start

    wanted = [(name, which) for which in PASSES for name in ("one", *METHODS)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = dict(zip(wanted, pool.map(lambda x: compiled(*x), wanted), strict=True))
    found = {key: x for key, x in found.items() if x is not None}
    print(f"# {row.name}: compiled, at most {max(s for _, s in found.values()):.1f} s", flush=True)
    return {key: call for key, (call, _) in found.items()}


# ---- numbers -------------------------------------------------------------------------------------


def errors_of(found, right, layout) -> list[float]:
    """The difference of each result from that of one device, relative to its size."""
    import jax
    import jax.numpy as jnp

    wide = lambda x: x.astype(jnp.float32)
    norm = jax.jit(lambda x, y: jnp.linalg.norm(wide(x) - wide(y)) / jnp.linalg.norm(wide(y)))
    split = jax.jit(layout.split)
    pairs = zip(found, right, strict=True)
    return [float(norm(x, jax.device_put(split(y), x.sharding))) for x, y in pairs]


def milliseconds(call: Callable, count: int) -> float:
    """Of one call, `count` of them in flight; on a CPU, one by one."""
    import jax

    from xform.sharding import settle

    start = time.perf_counter()
    results = None
    for _ in range(count):
        results = settle(call())
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - start) / count


def measure(row: Row, mesh) -> dict:
    """Times and errors of everything in a row."""
    import jax

    from xform.sharding import context

    start = time.perf_counter()
    devices = mesh.size
    layout = layout_of(row, devices)
    made = time.perf_counter() - start
    mask = mask_of(row, ids_of(row))
    load = layout.load(mask, tile=min(128, layout.chunk))
    print(
        f"# {row.name}: {layout} in {made:.1f} s, busiest / mean {load.imbalance:.3f}", flush=True
    )
    shape = lambda h: (1, row.length // devices, h, row.size)
    q, k = (jax.ShapeDtypeStruct(shape(h), row.dtype) for h in (row.heads, row.kv_heads))
    plan = context.which(q, k, k, devices, mask_mod=mask, layout=layout)
    print(f"# {plan}".replace("\n", "\n# "), flush=True)
    calls = calls_of(row, layout, mesh)
    result: dict = {"row": asdict(row), "imbalance": load.imbalance, "ms": {}, "errors": {}}
    for which in PASSES:
        own = {name: call for (name, of), call in calls.items() if of == which}
        results = {}
        for name, call in list(own.items()):
            try:
                results[name] = jax.block_until_ready(call())
            except Exception:
                print(f"# {row.name}: {name} fails: {traceback.format_exc(limit=-3)}", flush=True)
                del own[name]
        if "one" in results:
            others = [name for name in results if name != "one"]
            result["errors"][which] = {
                name: errors_of(results[name], results["one"], layout) for name in others
            }
        results.clear()
        counts = {n: max(2, int(MILLISECONDS / milliseconds(c, 1))) for n, c in own.items()}
        rounds = [{n: milliseconds(c, counts[n]) for n, c in own.items()} for _ in range(ROUNDS)]
        result["ms"][which] = {name: median(r[name] for r in rounds) for name in own}
        say(row, which, result)
    return result


def title(mesh) -> None:
    """Prints what stands above the table."""
    import jax

    kind = mesh.devices.flat[0].device_kind
    print(f"# {mesh.size} x {kind}, jax {jax.__version__}; milliseconds (speed-up), error")
    print(f"| row | pass | one device | {' | '.join(METHODS)} |\n|{'---|' * (3 + len(METHODS))}")


def say(row: Row, which: str, result: dict) -> None:
    """Prints a line of the table."""
    ms, errors = result["ms"][which], result["errors"].get(which, {})
    cells = [f"{ms['one']:.2f}" if "one" in ms else "–"]
    for name in METHODS:
        if name not in ms:
            cells.append("–")
            continue
        speed = f" ({ms['one'] / ms[name]:.2f} x)" if "one" in ms else ""
        worst = f", off {max(errors[name]):.1e}" if name in errors else ""
        cells.append(f"{ms[name]:.2f}{speed}{worst}")
    print(f"| {row.name} | {which} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
    parser.add_argument("--devices", type=int, default=2, help="GPUs that share a sequence")
    parser.add_argument("--seconds", type=float, default=140, help="begin no row after so many")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--tiny", action="store_true", help="small rows on virtual CPU devices")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.tiny:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from xform.sharding import cpu_devices, make_mesh

    first = Row(options.lengths[0], "causal")
    if options.tiny:
        cpu_devices(options.devices)
        options.seconds = float("inf")
        first, options.lengths = TINY, [TINY.length]
    mesh = make_mesh(cp=options.devices, devices=jax.devices()[: options.devices])
    kind = mesh.devices.flat[0].device_kind
    title(mesh)
    results = []
    rows = [
        replace(first, length=length, mask=mask)
        for length in options.lengths
        for mask in options.masks
    ]
    for row in rows:
        if time.perf_counter() - start > options.seconds:
            print(f"# {row.name}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        try:
            results.append(measure(row, mesh))
        except Exception:
            print(f"# {row.name} fails: {traceback.format_exc(limit=-4)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"device": kind, "results": results}, indent=1))
    print(f"# {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
