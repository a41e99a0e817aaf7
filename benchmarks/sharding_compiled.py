"""What the layers of `sharding_gpu.py` move, read off programs compiled for H200s, with no GPU.

    python3 benchmarks/sharding_compiled.py          # two tables, in about five minutes

A row is both passes of the model there, compiled for as many GPUs as it says: bytes that its
kernels read and write, of these those of copies, messages and how many have a product beside them,
and temporaries of one GPU. Times it does not tell.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import P  # noqa: E402
from sharding_gpu import Sizes, both_passes, layer_of  # noqa: E402

import llama  # noqa: E402
from xform.sharding import Audit, TensorParallel, audit, cpu_devices, data, fsdp, make_mesh  # noqa: E402

SIZES = Sizes()
MODEL = SIZES.model
Shape = jax.ShapeDtypeStruct


def shapes(layers: int) -> dict:
    """Of the parameters of a stack of layers, in bfloat16."""
    init = lambda: llama.init(replace(MODEL, layers=layers), jax.random.key(0))["layers"]
    return jax.tree.map(lambda x: Shape(x.shape, jnp.bfloat16), jax.eval_shape(init))


def read(f, x: Shape, params: dict, mesh: dict[str, int], stream: P, specs: dict) -> Audit:
    """Both passes of `f(x, params)`, compiled."""
    (axis,) = mesh
    own = lambda x, p: f(x, data.per_device(p, axis))
    ins, outs = (stream, specs, stream), (stream, (stream, specs))
    run = lambda *args: jax.shard_map(both_passes(own), in_specs=ins, out_specs=outs)(*args)
    return audit(run, (x, params, x), mesh, specs=ins, strict=False)


def tensor(n: int, overlap: Literal["ring"] | None) -> Audit:
    """One layer, whose positions are split."""
    tp = TensorParallel("tp", sequence=True, overlap=overlap)
    specs = {name: P(*spec[1:]) for name, spec in llama.SPECS["layers"].items()}
    params = jax.tree.map(lambda x: Shape(x.shape[1:], x.dtype), shapes(1))
    x = Shape((1, SIZES.tokens, MODEL.width), jnp.bfloat16)
    layer = layer_of(MODEL, SIZES.tokens, tp)
    return read(layer, x, params, {"tp": n}, P(None, "tp"), specs)


def sharded(n: int, ahead: int | None) -> Audit:
    """Fully sharded layers, gathered so many ahead or by a plain scan."""
    params = shapes(SIZES.layers)
    whole = jax.tree.map(lambda spec: P(*(None for _ in spec)), llama.SPECS["layers"])
    specs = fsdp.split(whole, params, make_mesh(dp=n, devices=jax.devices()[:n]), skip=1)
    gather = partial(data.gather, specs={k: P(*s[1:]) for k, s in specs.items()}, axis="dp")
    layer = layer_of(MODEL, SIZES.per_device)

    def plain(x, stack):
        step = jax.checkpoint(lambda x, p: layer(x, gather(p)), prevent_cse=False)
        return llama.one_by_one(step, x, stack)

    scan = partial(fsdp.scan_layers, layer, gather=gather, ahead=ahead or 0)
    x = Shape((n, SIZES.per_device, MODEL.width), jnp.bfloat16)
    return read(plain if ahead is None else scan, x, params, {"dp": n}, P("dp"), specs)


def line(name: str, report: Audit) -> str:
    """One row."""
    kernels, messages = report.program.kernels, report.messages
    moved = lambda ks: sum(k.bytes * k.trips for k in ks) / 1e9
    copies = [k for k in kernels if k.kind == "copy"]
    covered = f"{sum(m.covered for m in messages)} of {len(messages)}"
    looped = [m for m in messages if m.looped]
    inside = f"{sum(m.covered for m in looped)} of {len(looped)}"
    numbers = (f"{moved(kernels):.2f}", f"{moved(copies):.2f}", covered, inside)
    return f"| {name} | {' | '.join(numbers)} | {report.memory['temporaries'] / 1e9:.2f} |"


def main() -> None:
    logging.disable(logging.WARNING)
    cpu_devices(8)
    rows = {
        "one layer": {
            f"tp={n}, {overlap or 'XLA'}": partial(tensor, n, overlap)
            for n in (2, 4, 8)
            for overlap in (None, "ring")
        },
        f"{SIZES.layers} layers, dp=2": {
            "plain scan" if ahead is None else f"{ahead} ahead": partial(sharded, 2, ahead)
            for ahead in (None, 0, 1, 2)
        },
    }
    for title, programs in rows.items():
        print(f"\n| {title} | GB moved | copies | hidden | of these in loops | GB of temporaries |")
        print("|---|---|---|---|---|---|")
        for name, compiled in programs.items():
            print(line(name, compiled()), flush=True)


if __name__ == "__main__":
    main()
