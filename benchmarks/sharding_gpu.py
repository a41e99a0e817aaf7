"""Communication that is hidden, on the GPUs of one host: layers of Llama-3 8B, both passes.

    python3 benchmarks/sharding_gpu.py          # two tables and parity, in about four minutes
    python3 benchmarks/sharding_gpu.py --tiny   # the same programs, small, on any devices

**Tensor parallelism**, one block of attention and feed-forward over all GPUs: XLA's own scheduling
of all-reduces and of gathers and scatters of positions, beside `overlap="ring"` and "pallas". The
bound is the same work with no communication at all: one device's part of the products, the stream
being whole. No schedule can be faster than that.

**Fully sharded layers**: a plain scan that gathers a layer's parameters where it uses them and
keeps none of them, beside `fsdp.scan_layers`, which gathers `ahead`. The bound is the same scan
over parameters that are whole on each device, with no sum of gradients.

**Parity**: loss and gradients of a small model on all GPUs, leaf by leaf, beside those on one.

Rows take turns, so that all meet the same clock and heat: a time is the median over rounds of some
calls in flight. Layers and tokens are random bfloat16 numbers, sums of products float32.
"""

from __future__ import annotations

import argparse
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import P  # noqa: E402

import llama  # noqa: E402
import parallel  # noqa: E402
from xform.primitives.masks import causal  # noqa: E402
from xform.sharding import (  # noqa: E402
    TensorParallel,
    cpu_devices,
    data,
    fsdp,
    make_mesh,
    parity,
)
from xform.train import Rows  # noqa: E402

ROUNDS, CALLS = 7, 4
LLAMA_8B = llama.Config(layers=1, width=4096, heads=32, kv_heads=8, head_size=128, hidden=14336)
SMALL = llama.Config(layers=1, width=64, heads=4, kv_heads=2, head_size=16, hidden=128)


@dataclass(frozen=True)
class Sizes:
    """Of both tables."""

    model: llama.Config = LLAMA_8B
    tokens: int = 8192
    layers: int = 8
    per_device: int = 4096
    """Tokens of a device, under `fsdp`."""


TINY = Sizes(SMALL, 64, 3, 32)


# ---- one layer -----------------------------------------------------------------------------------


def parameters(model: llama.Config, layers: int) -> dict:
    """Random bfloat16 parameters of a stack of layers."""
    params = llama.init(replace(model, layers=layers), jax.random.key(0))["layers"]
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def layer_of(model: llama.Config, length: int, tp: TensorParallel = llama.ONE) -> Callable:
    """`layer(x, p)`, causal."""
    cos, sin = (x.astype(jnp.bfloat16) for x in llama.rotations(jnp.arange(length), model))
    return lambda x, p: llama.layer(x, p, causal(), (cos, sin), model, tp)[0]


def both_passes(f: Callable) -> Callable:
    """`(x, params, dy) -> y, gradients`."""

    def run(x, p, dy):
        y, pull = jax.vjp(f, x, p)
        return y, pull(dy)

    return run


# ---- tensor parallelism --------------------------------------------------------------------------


def tensor_rows(sizes: Sizes, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], Callable]]:
    """By name, what makes a call."""
    model, n = sizes.model, mesh.size
    params = jax.tree.map(lambda x: x[0], parameters(model, 1))
    specs = {name: P(*spec[1:]) for name, spec in llama.SPECS["layers"].items()}
    draw = lambda seed: jax.random.normal(
        jax.random.key(seed), (1, sizes.tokens, model.width), jnp.bfloat16
    )

    def split(tp: TensorParallel) -> Callable:
        stream = P(None, "tp") if tp.sequence else P()

        def block(x, p, dy):
            of_own = lambda x, p: layer_of(model, sizes.tokens, tp)(
                x, data.per_device(p, "tp" if tp.sequence else ())
            )
            return both_passes(of_own)(x, p, dy)

        run = jax.shard_map(
            block, mesh=mesh, in_specs=(stream, specs, stream), out_specs=(stream, (stream, specs))
        )
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        parts = {name: put(params[name], spec) for name, spec in specs.items()}
        return compiled(run, (put(draw(1), stream), parts, put(draw(2), stream)))

    def alone() -> Callable:
        part = replace(
            model, heads=model.heads // n, kv_heads=model.kv_heads // n, hidden=model.hidden // n
        )
        share = lambda size, axis: slice(size // n if axis else size)
        own = lambda x, spec: x[tuple(map(share, x.shape, spec))]
        mine = {name: own(params[name], spec) for name, spec in specs.items()}
        return compiled(both_passes(layer_of(part, sizes.tokens)), (draw(1), mine, draw(2)))

    tp = partial(TensorParallel, "tp")
    return {
        "XLA, all-reduces": lambda: split(tp()),
        "XLA, positions split": lambda: split(tp(sequence=True)),
        "ring": lambda: split(tp(sequence=True, overlap="ring")),
        "pallas": lambda: split(tp(sequence=True, overlap="pallas")),
        "bound: no communication": alone,
    }


# ---- fully sharded layers ------------------------------------------------------------------------


def fsdp_rows(sizes: Sizes, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], Callable]]:
    """By name, what makes a call."""
    model, layers = sizes.model, sizes.layers
    params = parameters(model, layers)
    whole = jax.tree.map(lambda spec: P(*(None for _ in spec)), llama.SPECS["layers"])
    specs = fsdp.split(whole, params, mesh, skip=1)
    gather = partial(data.gather, specs={k: P(*s[1:]) for k, s in specs.items()}, axis="dp")
    layer = layer_of(model, sizes.per_device)
    x = jax.random.normal(
        jax.random.key(1), (mesh.size, sizes.per_device, model.width), jnp.bfloat16
    )
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))

    def plain(x, stack):
        step = jax.checkpoint(lambda x, p: layer(x, gather(p)), prevent_cse=False)
        return llama.one_by_one(step, x, stack)

    def sharded(scan: Callable) -> Callable:
        def run(x, stack, dy):
            return both_passes(scan)(x, data.per_device(stack, "dp"), dy)

        run = jax.shard_map(
            run, mesh=mesh, in_specs=(P("dp"), specs, P("dp")),
            out_specs=(P("dp"), (P("dp"), specs)),
        )  # fmt: skip
        args = put(x, P("dp")), {k: put(v, specs[k]) for k, v in params.items()}, put(x, P("dp"))
        return compiled(run, args)

    def alone() -> Callable:
        step = jax.checkpoint(layer, prevent_cse=False)
        return compiled(both_passes(partial(llama.one_by_one, step)), (x[:1], params, x[:1]))

    ahead = lambda k, **options: partial(fsdp.scan_layers, layer, gather=gather, ahead=k, **options)
    return {
        "plain scan": lambda: sharded(plain),
        "one ahead": lambda: sharded(ahead(1)),
        "two ahead": lambda: sharded(ahead(2)),
        "one ahead, kept": lambda: sharded(ahead(1, keep=True)),
        "bound: no communication": alone,
    }


# ---- times ---------------------------------------------------------------------------------------


def compiled(f: Callable, args: tuple) -> Callable:
    """A call of no arguments."""
    return partial(jax.jit(f).lower(*args).compile(), *args)


def made(rows: dict[str, Callable[[], Callable]]) -> dict[str, Callable]:
    """Those that can be made; says what the others said."""
    calls = {}
    for name, make in rows.items():
        start = time.perf_counter()
        try:
            calls[name] = make()
            jax.block_until_ready(calls[name]())
        except Exception as e:  # a row that fails is a finding, not the end of the table
            calls.pop(name, None)
            print(f"# {name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            continue
        print(f"# {name}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    return calls


def milliseconds(call: Callable, calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(calls)])
    return 1e3 * (time.perf_counter() - start) / calls


def timed(title: str, rows: dict[str, Callable[[], Callable]], base: str, calls: int) -> None:
    """Prints a table of rows that took turns."""
    ready = made(rows)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS):
        for name in list(ready)[:: -1 if turn % 2 else 1]:
            times[name].append(milliseconds(ready[name], calls))
    found = {name: median(ms) for name, ms in times.items()}
    print(f"\n| {title} | ms | × {base} | of the bound |\n|---|---|---|---|")
    missing = float("nan")
    bound = found.get("bound: no communication", missing)
    for name, ms in found.items():
        print(f"| {name} | {ms:.2f} | {found.get(base, missing) / ms:.3f} | {bound / ms:.3f} |")
    print(flush=True)


# ---- parity --------------------------------------------------------------------------------------


def same_as_one(devices: list) -> None:
    """Prints how far loss and gradients are from one device's."""
    model = llama.Config(layers=2, width=64, heads=4, kv_heads=2, head_size=16, hidden=128)
    params = llama.init(model, jax.random.key(0))
    shape = (len(devices), 64)
    tokens = np.random.default_rng(1).integers(0, model.codes, shape, np.int32)
    rows = Rows(tokens, np.zeros(shape, np.int32), np.roll(tokens, -1, axis=1))
    layouts: dict[str, tuple[dict, dict[str, Any]]] = {
        "dp": ({"dp": len(devices)}, {}),
        "fsdp, two ahead": ({"dp": len(devices)}, {"fsdp": True, "ahead": 2}),
        "tp": ({"tp": len(devices)}, {}),
        "tp, ring": ({"tp": len(devices)}, {"sequence": True, "overlap": "ring"}),
    }
    print("\n| layout | the worst leaf is off by | of |\n|---|---|---|")
    for name, (axes, options) in layouts.items():
        sizes = {"dp": 1, "tp": 1} | axes
        mesh, layout = make_mesh(**sizes, devices=devices), parallel.Layout(**options)
        specs = parallel.specs_for(layout, model, mesh)
        loss = partial(parallel.loss_and_grads, model=model, layout=layout, specs=specs)
        one = lambda params, rows: llama.loss(params, rows, model)[0] / rows.labels.size
        check = parity(
            loss, mesh, (specs, P("dp")), reference=one, gives_gradients=True, rtol=1e-4,
            strict=False,
        )  # fmt: skip
        found = check(params, rows)
        worst = max(found.leaves, key=lambda leaf: leaf.error)
        print(f"| {name} | {worst.error:.1e} | {worst.path or 'loss'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any two devices")
    parser.add_argument("--only", default="tensor,fsdp,parity", help="parts of the script")
    parser.add_argument("--rows", default="", help="rows whose name contains one of these parts")
    options = parser.parse_args()
    if options.tiny:
        cpu_devices(2)
    devices = jax.devices()
    if len(devices) < 2:
        sys.exit(f"This measures several devices; JAX found {len(devices)}: {devices}.")
    logging.disable(logging.WARNING)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    print(
        f"{len(devices)} × {devices[0].device_kind}, jax {jax.__version__}, "
        f"Python {platform.python_version()}, commit {commit or 'unknown'}; bfloat16"
    )
    sizes, calls = (TINY, 1) if options.tiny else (Sizes(), CALLS)
    parts = options.rows.split(",")
    asked = lambda rows: {n: make for n, make in rows.items() if any(p in n for p in parts)}
    if "tensor" in options.only:
        rows = asked(tensor_rows(sizes, make_mesh(tp=len(devices), devices=devices)))
        title = f"one layer, {sizes.tokens:,} tokens, tp={len(devices)}"
        timed(title, rows, "XLA, positions split", calls)
    if "fsdp" in options.only:
        rows = asked(fsdp_rows(sizes, make_mesh(dp=len(devices), devices=devices)))
        title = f"{sizes.layers} layers, {sizes.per_device:,} tokens a device, dp={len(devices)}"
        timed(title, rows, "plain scan", calls)
    if "parity" in options.only:
        same_as_one(devices)


if __name__ == "__main__":
    main()
