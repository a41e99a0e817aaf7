"""Finds the fastest tiles for every class of call of attention, on one GPU, in under four minutes.

    python3 benchmarks/attention_tune.py                    # rewrites the table that kernels read
    python3 benchmarks/attention_tune.py --out tiles.json   # writes it elsewhere
    python3 benchmarks/attention_tune.py --size 128         # heads of one size only

The classes are those of `xform/lowering/mosaic_gpu/_tuning.py`: the head size, the number of keys,
what mods need. Each stands for the calls below. Of each size, all tiles that fit are timed on one
of them; the fastest, the first of these by persistent blocks, and those that the table has now, on
the others. Those of a class are the ones
with the least product of times over its calls; the ones of today stay where none is faster by more
than a run differs from the next.

What runs is the kernel alone, with random inputs; candidates take turns, and a time is the median
over rounds of some calls in flight. A class that is not reached in time keeps what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from attention_gpu import DOCUMENT, Row, jax_inputs, mask_of, milliseconds, score_of  # noqa: E402

from xform.lowering import mosaic_gpu  # noqa: E402
from xform.lowering.mosaic_gpu import _careful  # noqa: E402
from xform.lowering.mosaic_gpu._attend import programs  # noqa: E402
from xform.lowering.mosaic_gpu._tuning import (  # noqa: E402
    LENGTHS,
    MODS,
    SIZES,
    Tiles,
    key,
    mods_class,
    vectors_of,
)
from xform.primitives.attention import _traced  # noqa: E402
from xform.primitives.block_map import block_map  # noqa: E402

TABLE = ROOT / "xform/lowering/mosaic_gpu/tiles.json"
SHAPES = {"short": (4, 4096), "long": (1, 16384)}  # B and T, with 2,048 numbers per token
CALLS = {
    "plain": [("full", "")],
    "mask": [("causal", "")],
    "score": [("causal", "cap"), ("causal", "alibi")],
    "vectors": [("causal", "table"), ("documents", "")],
}
"""By class of mods: masks and scores of `attention_gpu`."""
ROUNDS, MILLISECONDS, KEPT = 7, 12, 3
GAIN = 0.99  # of today's time; what differs by less differs by chance
SECONDS = 210

# It repairs what is not finite: nothing here, and compiling it would take half of the time.
_careful.careful = lambda call, q, k, v, steps, operands, out, finite, **_: out


def calls(size: int, length: str, mods: str) -> list[Row]:
    """The calls that stand for a class."""
    b, t = SHAPES[length]
    heads = 2048 // size
    return [Row(f"{size} {length} {m} {s}", b, t, heads, heads, size, m, s) for m, s in CALLS[mods]]


def candidates(size: int) -> list[Tiles]:
    """All tiles that fit heads of a size."""
    every = itertools.product((2, 3), (64, 128, 192), (2, 3, 4), (False, True))
    tiles = [Tiles(warpgroups=w, kv=kv, stages=n, in_turns=turns) for w, kv, n, turns in every]
    return [t for t in tiles if t.fit(size, size)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, traced once for all tiles."""

    row: Row

    def spec(self, q, slopes, table, ids):
        score = score_of(self.row.score, jnp.tanh, slopes, table, self.row.t)
        return _traced(q, score, mask_of(self.row.mask, ids), self.row.d**-0.5, 0.0)

    def inputs(self) -> tuple:
        (q, k, v), slopes, table = jax_inputs(self.row)
        return q, k, v, slopes, table, jnp.arange(self.row.t) // DOCUMENT

    def attend(self, tiles: Tiles, q, k, v, *arrays):
        spec, captures, context = self.spec(q, *arrays)
        run = partial(mosaic_gpu.attend, spec, block_map, 0, q, k, v, captures, context)
        return run(dtype=q.dtype, tiles=tiles)[0]

    def parts(self, inputs: tuple):
        """Its programs: what the class of a call is made of."""
        return programs(self.spec(inputs[0], *inputs[3:])[0])


def compiled(case: Case, inputs: tuple, tiles: Tiles) -> Callable | None:
    """A call with these tiles, or None, and says why."""
    try:
        program = jax.jit(partial(case.attend, tiles)).lower(*inputs).compile()
    except Exception as e:  # a tile that does not compile is a finding, not the end of the search
        print(f"# {case.row.name}: {tiles}: {type(e).__name__}: {str(e).splitlines()[0][:90]}")
        return None
    return partial(program, *inputs)


def times(row: Row, tiles: Iterable[Tiles], pool: ThreadPoolExecutor) -> dict[Tiles, float]:
    """Milliseconds with each of `tiles` that fit this call."""
    case = Case(row)
    inputs = jax.block_until_ready(case.inputs())
    parts = case.parts(inputs)
    assert mods_class(parts) in row_class(row), f"{row.name} is of class {mods_class(parts)}"
    fitting = [t for t in tiles if t.fit(row.d, row.d, vectors_of(parts))]
    made = dict(zip(fitting, pool.map(partial(compiled, case, inputs), fitting), strict=True))
    ready = {t: call for t, call in made.items() if call is not None}
    counts = {t: max(3, int(MILLISECONDS / milliseconds(c, 3))) for t, c in ready.items()}
    rounds: dict[Tiles, list[float]] = {t: [] for t in ready}
    for n in range(ROUNDS):
        for t in list(ready)[:: -1 if n % 2 else 1]:
            rounds[t].append(milliseconds(ready[t], counts[t]))
    return {t: median(x) for t, x in rounds.items()}


def row_class(row: Row) -> list[str]:
    """The class of mods that a call stands for."""
    return [mods for mods, pairs in CALLS.items() if (row.mask, row.score) in pairs]


def today(size: int, length: str, mods: str) -> Tiles:
    """What the table has now."""
    entry = json.loads(TABLE.read_text())
    entry = entry.get(jax.devices()[0].device_kind) or next(iter(entry.values()))
    return Tiles(**entry["forward"][key(size, length, mods)])


def best(found: list[dict[Tiles, float]], now: Tiles) -> tuple[Tiles, float]:
    """The tiles with the least product of times, and that as a part of today's."""
    common = set.intersection(*(set(times) for times in found))
    product = {t: math.exp(math.fsum(math.log(f[t]) for f in found) / len(found)) for t in common}
    if now not in product:
        return min(product, key=product.__getitem__), float("nan")
    first = min(product, key=product.__getitem__)
    first = first if product[first] < GAIN * product[now] else now
    return first, product[first] / product[now]


def search(size: int, pool: ThreadPoolExecutor, end: float) -> dict[str, Tiles]:
    """The tiles of the classes of one head size, as many as are reached until `end`."""
    start = time.perf_counter()
    (probe,) = calls(size, "short", "mask")
    first = times(probe, candidates(size), pool)
    kept = sorted(first, key=first.__getitem__)[:KEPT]
    seconds = time.perf_counter() - start
    print(f"# heads of {size}: {len(first)} tiles, {seconds:.0f} s; kept {kept}", flush=True)
    chosen = {}
    for length, mods in itertools.product(LENGTHS, MODS):
        if time.perf_counter() > end:
            print(f"{key(size, length, mods):18} as it is: there was no time")
            continue
        now = today(size, length, mods)
        rows = calls(size, length, mods)
        tiles = list(dict.fromkeys([*kept, dataclasses.replace(kept[0], persistent=True), now]))
        chosen[key(size, length, mods)], gain = best([times(r, tiles, pool) for r in rows], now)
        print(f"{key(size, length, mods):18} {chosen[key(size, length, mods)]}", end=" ")
        print(f"{gain:.3f} of today's", flush=True)
        jax.clear_caches()
    return chosen


def write(path: Path, chosen: dict[str, Tiles]) -> None:
    """Puts this device's entry into the table; one line for each class."""
    table = json.loads(TABLE.read_text())
    kind = jax.devices()[0].device_kind
    forward = table.get(kind, next(iter(table.values())))["forward"]
    forward |= {name: dataclasses.asdict(tiles) for name, tiles in chosen.items()}
    run = f"benchmarks/attention_tune.py, jax {jax.__version__}, Python {platform.python_version()}"
    table[kind] = {**table.get(kind, {}), "run": run, "forward": forward}
    path.write_text(text(table))


def text(table: dict) -> str:
    """As JSON whose innermost objects are lines."""
    line = lambda x, deep: (
        json.dumps(x)
        if not isinstance(x, dict) or not any(isinstance(v, dict) for v in x.values())
        else "{\n" + ",\n".join(
            "  " * (deep + 1) + json.dumps(k) + ": " + line(v, deep + 1) for k, v in x.items()
        ) + "\n" + "  " * deep + "}"
    )  # fmt: skip
    return line(table, 0) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=TABLE, help="where the table goes")
    parser.add_argument("--size", type=int, choices=SIZES, help="of heads; all by default")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"This measures a GPU; JAX found {jax.default_backend()} alone.")
    logging.disable(logging.WARNING)
    start, chosen = time.perf_counter(), {}
    sizes = (options.size,) if options.size else (128, 64, 256)
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        for n, size in enumerate(sizes):
            chosen |= search(size, pool, start + SECONDS * (n + 1) / len(sizes))
            write(options.out, chosen)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
