"""The kernels without a GPU: compiled for one, and run in the interpreter, watched for races."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as
from tests.primitives.cases import CASES
from xform import causal, documents, flex_attention, sliding_window, which
from xform._compat import found_races
from xform.lowering import mosaic_gpu
from xform.lowering.mosaic_gpu import _attend, _call
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._tuning import Tiles
from xform.primitives import attention
from xform.primitives._choose import Choice
from xform.primitives.block_map import block_map
from xform.primitives.scores import softcap

ROOT = Path(__file__).parents[3]
SLOPES, TABLE = jnp.arange(4.0), jnp.zeros((4, 4096))
IDS = jnp.arange(1024) // 100
PAIRS = jax.random.normal(jax.random.key(1), (4, 1024, 1024), jnp.bfloat16)
GRAPH = jax.random.bernoulli(jax.random.key(2), 0.1, (1024, 1024))
BITS = jax.random.bits(jax.random.key(3), (1024, 32), jnp.uint32).astype(jnp.int32)
MODS = {
    "no mods": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": causal() & sliding_window(256)},
    "documents": {"mask_mod": causal() & documents(IDS)},
    "alibi": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k), "mask_mod": causal()},
    "soft cap": {"score_mod": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), "mask_mod": causal()},
    "soft cap by exp": {"score_mod": softcap(30.0), "mask_mod": causal()},
    "soft cap, nearly": {"score_mod": softcap(30.0, rtol=5e-4), "mask_mod": causal()},
    "table": {"score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + 2048]},
    "rows and columns": {"score_mod": lambda s, b, h, q, k: s * TABLE[h, q] + TABLE[0, k]},
    "pairs": {"score_mod": lambda s, b, h, q, k: s + PAIRS[h, q, k], "mask_mod": causal()},
    "filled": {
        "score_mod": lambda s, b, h, q, k: (
            s + PAIRS.at[h, q - 3, k + 990].get(mode="fill", fill_value=1.0)
        )
    },
    "select": {
        "score_mod": lambda s, b, h, q, k: jnp.select([s > 1, s > 0, q > k], [s, 2 * s, -s], 0.5)
    },
    "graph": {"mask_mod": lambda b, h, q, k: GRAPH[q, k]},
    "bits": {"mask_mod": lambda b, h, q, k: (BITS[q, k // 32] >> (k % 32)) & 1 == 1},
}
VARIANTS = [
    *[("causal", size, "bfloat16") for size in (16, 64, 96, 128, 256)],
    *[(name, 128, "bfloat16") for name in MODS if name != "causal"],
    *[("alibi", 64, "float16"), ("table", 64, "float16"), ("soft cap", 256, "float16")],
]
SPILLED = {"select": 44, "bits": 52}
"""Bytes of registers that go to memory, of 960 a thread: mods of many values at a time; else 0."""
QUICK = [("causal", 128, "bfloat16"), ("pairs", 128, "bfloat16")]


def compiled(function: str, size: int, dtype: str, tmp_path: Path) -> tuple[str, list[str]]:
    """Compiles a function of q, k and v; what was printed of it, and the assembler's reports."""
    program = f"""
from functools import partial
import jax
jax.config.update("jax_platforms", "cpu")
from tests.lowering.mosaic_gpu.test_kernel import MODS
from xform import flex_attention
from xform._hlo import compile_for
x = jax.ShapeDtypeStruct((1, 1024, 4, {size}), "{dtype}")
text = compile_for("H200", {function}, x, x, x).as_text()
print("kernels:", text.count('custom_call_target="mosaic_gpu'), "copies:", text.count(" copy("))
"""
    # A process of its own: the compiler reads these once, and a cached program has no report.
    dump = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **dump, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    reports = [f.read_text() for f in tmp_path.glob("*.ptxas")]
    return printed, [r for r in reports if "careful" not in r]  # it repairs, and need not be fast


def spills(reports: list[str]) -> list[int]:
    """Bytes of registers that went to memory; no product may be serialised."""
    assert not any(code in r for r in reports for code in ("C7510", "C7512", "C7513"))
    return [int(n) for r in reports for n in re.findall(r"(\d+) bytes spill stores", r)]


@pytest.mark.parametrize(
    ("mods", "size", "dtype"),
    [pytest.param(*v, marks=() if v in QUICK else pytest.mark.slow) for v in VARIANTS],
)
def test_compiles_for_an_h200_with_its_values_in_registers(mods, size, dtype, tmp_path):
    """And without the compiler's serialising of products, which would halve the speed."""
    printed, reports = compiled(f"partial(flex_attention, **MODS['{mods}'])", size, dtype, tmp_path)
    assert f"kernels: {2 if 'mask_mod' in MODS[mods] else 1}" in printed
    assert max(spills(reports)) <= SPILLED.get(mods, 0)


class Interpreted:
    """In place of the primitive: the kernels in the interpreter, which a lowering can't hold."""

    @staticmethod
    def bind(*args, spec, hidden, dtype, **_):
        q, k, v, *rest = args
        captures, context = rest[: len(spec.reads)], rest[len(spec.reads) :]
        params = plgpu.InterpretGPUParams(detect_races=True)
        return mosaic_gpu.attend(
            spec, block_map, hidden, q, k, v, captures, context, dtype=dtype, interpret=params
        )


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention, "flex_attention_p", Interpreted)
    yield
    assert not found_races()


EASY = ["bfloat16", "hidden minus infinity"]
HARD = [
    "rows without a key", "a batch without a key", "no visible pair", "more queries than keys",
    "hidden NaN", "a NaN that is seen", "odd sizes", "five to one", "one query", "float16",
    "scores of ten thousand", "scores near minus ten thousand", "the mod ignores its score",
    "a mod that is NaN where hidden", "soft cap, bias, window and sinks",
]  # fmt: skip


@pytest.mark.parametrize("name", [*EASY, *[pytest.param(n, marks=pytest.mark.slow) for n in HARD]])
def test_gives_the_table_in_the_interpreter(name, interpreted):
    case = CASES[name]
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    case = dataclasses.replace(case, dtype=dtype, aux=("lse",))
    x, _ = case.inputs()
    pairs = case.pairs(x)
    found = jax.jit(lambda x: case.attend(x, None))(x)
    judge = jax.jit(lambda x: case.by_pairs(x, pairs))(x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)
        true = jax.tree.map(np.asarray, jax.jit(lambda x: case.by_pairs(x, pairs))(wide))
    for name in found:
        a, b = np.asarray(found[name], np.float64), true[name]
        for kind in (np.isnan, np.isposinf, np.isneginf):
            assert np.array_equal(kind(a), kind(b)), f"{name}: {kind}"
    finite = lambda tree: {n: np.where(np.isfinite(true[n]), tree[n], 0) for n in found}
    assert_as_right_as(finite(found), finite(judge), finite(true))


@pytest.mark.parametrize(
    "mods", [pytest.param(n, marks=() if n == "table" else pytest.mark.slow) for n in MODS]
)
def test_many_tiles_without_a_race(mods, interpreted):
    """More than twice as many key tiles as there are in shared memory, so that each is reused.

    And with each the vectors that travel with it, which are read by ordinary loads.
    """
    shape = (1, 700, 2, 32)
    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape), jnp.bfloat16)
    options: Any = dict(MODS[mods])
    if mods == "documents":
        options["mask_mod"] = documents(jnp.arange(700) // 90)
    found = flex_attention(q, k, v, **options)
    true = flex_attention(q, k, v, implementation="reference", **options)
    error = jnp.linalg.norm((found - true).astype(jnp.float32)) / jnp.linalg.norm(
        true.astype(jnp.float32)
    )
    assert error < 4e-3


@pytest.mark.parametrize("mods", ["causal", pytest.param("no mods", marks=pytest.mark.slow)])
def test_blocks_with_several_rows_give_the_same_bits(mods, interpreted, monkeypatch):
    """An odd number of rows, dealt to two blocks, each with more tiles than shared memory holds."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 300, 1, 16), jnp.bfloat16)
    attend = lambda tiles: [
        monkeypatch.setattr(_attend, "tiles_of", lambda *_, **__: tiles),
        flex_attention(q, k, v, **MODS[mods]),
    ][1]
    monkeypatch.setattr(_call, "MULTIPROCESSORS", 2)
    tiles = Tiles(kv=64, in_turns=True)
    found = attend(dataclasses.replace(tiles, persistent=True))
    assert jnp.array_equal(found, attend(tiles))


@pytest.mark.parametrize(("sizes", "blocks"), [((2, 3, 5), 7), ((1, 1, 5), 5), ((3, 4, 2), 8)])
def test_blocks_share_every_place_once(sizes, blocks, monkeypatch):
    monkeypatch.setattr(_call, "MULTIPROCESSORS", blocks)
    share = _call.Share(tuple(zip(("batch", "row", "head"), sizes, strict=True)))
    seen = lambda _: share.fold(
        lambda place, x: x.at[*place].add(1),
        jnp.zeros((sizes[0], sizes[2], sizes[1]), jnp.int32),
    )
    counts = jax.vmap(seen, axis_name="block")(jnp.arange(blocks))
    assert (counts.sum(0) == 1).all()
    each = counts.sum((1, 2, 3))
    assert each.max() - each.min() <= 1


def test_says_what_would_run_and_why():
    q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    assert which(q, q, q) == Choice(
        "blockwise", "no kernel: the program is for cpu, not for an NVIDIA GPU"
    )
    wide = jnp.ones((1, 8, 2, 16), jnp.float32)
    why = which(wide, wide, wide, score_mod=lambda s, b, h, q, k: s + TABLE[0, q * k]).why
    assert "q, k and v are float32" in why
    assert "in `score_mod`: a read of an array at an index that mixes query and key" in why


def test_by_name_it_runs_or_says_all_that_is_in_the_way():
    q = jnp.ones((1, 8, 2, 300), jnp.float32)
    message = (
        r"are float32; the tensor cores take bfloat16 and float16; a head size of 300; at most"
    )
    with pytest.raises(NotImplementedError, match=message):
        flex_attention(q, q, q, implementation="mosaic_gpu")
    q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="the program is for cpu"):
        flex_attention(q, q, q, implementation="mosaic_gpu")
