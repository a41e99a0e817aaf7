"""The decoding kernel without a GPU: compiled for one, and interpreted, watched for races."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lowering.mosaic_gpu.test_kernel import ROOT, spills
from xform import causal, decode_attention, paged_attention, sliding_window, which
from xform._compat import found_races
from xform.lowering import mosaic_gpu
from xform.lowering._tile_fn import log_sum
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu import _split_keys
from xform.lowering.mosaic_gpu._split_keys import splits_of
from xform.primitives import _by_kernel, attention
from xform.primitives._choose import Device
from xform.primitives.block_map import block_map
from xform.primitives.scores import alibi, softcap

HOPPER = Device("cuda", "9.0", "NVIDIA H200")
SLOPES = jnp.arange(8.0) / 8
MODS = {
    "nothing": {},
    "window": {"mask_mod": causal() & sliding_window(100)},
    "window, soft cap and slopes": {
        "mask_mod": causal() & sliding_window(100), "score_mod": softcap(20.0) >> alibi(SLOPES),
    },
    "causal": {"mask_mod": causal()},
    "every third": {"mask_mod": lambda b, h, q, k: (k + b) % 3 != 1},
}  # fmt: skip
# T, mods, head size, keys of a page or 0; and bytes of registers that go to memory.
VARIANTS = [
    (1, "nothing", 128, 0, 0), (1, "nothing", 128, 128, 0), (1, "window", 128, 16, 0),
    (4, "window, soft cap and slopes", 128, 0, 8), (1, "window, soft cap and slopes", 64, 0, 8),
    (128, "causal", 64, 0, 0), (1, "causal", 256, 0, 268), (1, "nothing", 64, 8, 68),
]  # fmt: skip
QUICK = [VARIANTS[1]]


@pytest.mark.parametrize(
    ("new", "mods", "size", "page", "spilled"),
    [pytest.param(*v, marks=() if v in QUICK else pytest.mark.slow) for v in VARIANTS],
)
def test_compiles_for_an_h200(new, mods, size, page, spilled, tmp_path: Path):
    """Without serialised products, and by two kernels."""
    program = f"""
import jax
jax.config.update("jax_platforms", "cpu")
from tests.lowering.mosaic_gpu.test_decode import MODS
from xform import decode_attention, paged_attention
from xform._hlo import compile_for
of = jax.ShapeDtypeStruct
q, lengths = of((2, {new}, 8, {size}), "bfloat16"), of((2,), "int32")
options = dict(implementation="mosaic_gpu", **MODS["{mods}"])
if {page}:
    keys, table = of((64, {page or 1}, 2, {size}), "bfloat16"), of((2, 32), "int32")
    run = lambda q, k, v, table, n: paged_attention(q, k, v, table, n, **options)
    compiled = compile_for("H200", run, q, keys, keys, table, lengths)
else:
    keys = of((2, 4096, 2, {size}), "bfloat16")
    run = lambda q, k, v, n: decode_attention(q, k, v, n, **options)
    compiled = compile_for("H200", run, q, keys, keys, lengths)
print("kernels:", compiled.as_text().count('custom_call_target="mosaic_gpu'))
"""
    dump = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **dump, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    assert "kernels: 2" in printed
    reports = [f.read_text() for f in tmp_path.glob("*.ptxas")]
    assert len(reports) == 2
    assert max(spills(reports)) <= spilled


class Interpreted:
    """In place of the primitive: the kernels in the interpreter, which a lowering can't hold."""

    @staticmethod
    def bind(*args, spec, paged, dtype, implementation):
        del implementation
        q, cache, captures, context = _by_kernel._Operands.of(args, spec, paged=paged)
        out, top, total = mosaic_gpu.decode(
            spec, block_map, q, *cache[:2], captures, context, ends=cache.lengths,
            table=cache.table, dtype=dtype,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )  # fmt: skip
        return out, log_sum(top, total)


@pytest.fixture
def on_a_hopper(monkeypatch):
    """As if arrays were put on one that has few multiprocessors, so that keys are split."""
    monkeypatch.setattr(_by_kernel, "default_device", lambda: HOPPER)
    monkeypatch.setattr(_split_keys, "_SPLIT", 128)
    monkeypatch.setattr(_split_keys, "_PROCESSORS", 8)


@pytest.fixture
def interpreted(on_a_hopper, monkeypatch):
    monkeypatch.setattr(_by_kernel, "kept_attention_p", Interpreted)
    yield
    assert not found_races()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def problem(new, page=0, size=32, heads=8, kv_heads=2, keys=512) -> tuple[Any, Any]:
    """Texts of 200 tokens, none and all; what lies behind an end is NaN."""
    lengths = jnp.array([200, 0, keys])
    there = (jnp.arange(keys)[None] < lengths[:, None])[..., None, None]
    k, v = (jnp.where(there, normal(n, 3, keys, kv_heads, size), jnp.nan) for n in (1, 2))
    q = normal(0, 3, new, heads, size)
    if not page:
        return decode_attention, (q, k, v, lengths)
    count = 3 * keys // page
    where = np.random.default_rng(0).permutation(count).reshape(3, -1)
    pools = [jnp.zeros((count, page, *x.shape[2:]), x.dtype) for x in (k, v)]
    pools = [
        pool.at[where.reshape(-1)].set(x.reshape(-1, page, *x.shape[2:]))
        for pool, x in zip(pools, (k, v), strict=True)
    ]
    holes = np.where((np.arange(where.shape[1]) % 7 == 3), -1, where)
    return paged_attention, (q, *pools, jnp.asarray(holes), lengths)


CASES = [
    (1, "nothing", 16, {}), (1, "window, soft cap and slopes", 0, {}),
    (3, "every third", 128, {}), (3, "window", 0, {"size": 96, "kv_heads": 8}),
    (128, "causal", 0, {}), (1, "nothing", 256, {"size": 256}), (1, "nothing", 0, {"size": 64}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("new", "mods", "page", "sizes"),
    [pytest.param(*c, marks=() if n == 0 else pytest.mark.slow) for n, c in enumerate(CASES)],
)
def test_gives_what_parts_give(new, mods, page, sizes, interpreted):
    """Grouped heads, ragged and empty texts, NaN behind their ends, pages out of order, holes."""
    attend, args = problem(new, page, **sizes)
    out, aux = jax.jit(lambda *x: attend(*x, aux="lse", **MODS[mods]))(*args)
    true, true_aux = attend(*args, aux="lse", splits=1, **MODS[mods])
    assert np.array_equal(np.isneginf(aux.lse), np.isneginf(true_aux.lse))
    assert np.isneginf(aux.lse).any()
    seen = ~np.isneginf(aux.lse)
    np.testing.assert_allclose(aux.lse[seen], true_aux.lse[seen], atol=2e-5)
    assert not np.asarray(out, np.float32)[~seen].any()
    out, true = (np.asarray(x, np.float32) for x in (out, true))
    np.testing.assert_allclose(out, true, atol=1.6e-2)


@pytest.mark.slow
def test_what_is_seen_and_not_finite_is_nan(interpreted):
    """In the one sum that it enters, and nowhere else."""
    attend, (q, k, v, lengths) = problem(3)
    v = v.at[0, 7, 0, 5].set(jnp.nan).at[2, 300, 1, 2].set(jnp.inf)
    mask = lambda b, h, t, j: (j != 7) | (h == 1)
    out = attend(q, k, v, lengths, mask_mod=mask)
    true = attend(q, k, v, lengths, mask_mod=mask, splits=1)
    assert np.isnan(np.asarray(true, np.float32)).sum() == 3 + 4 * 3
    assert np.array_equal(np.isnan(out), np.isnan(true))


def test_derivatives_and_vmap_are_those_of_parts(on_a_hopper):
    """The primitive on a device that is none, with all of its rules."""
    attend, args = problem(2, 32)
    args = (args[0], *map(jnp.nan_to_num, args[1:3]), *args[3:])

    def loss(q, k, slopes, **options):
        score = softcap(3.0) >> alibi(slopes)
        out, aux = attend(
            q, k, *args[2:], score_mod=score, mask_mod=causal(), aux="lse", **options
        )  # fmt: skip
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(aux.lse), aux.lse, 0).sum()

    several = lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, None))
    given = jnp.stack([args[0], 2 * args[0]]), args[1], SLOPES
    found = several(loss)(*given)
    true = several(lambda *x: loss(*x, splits=1))(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), found, true)


def test_splits_keep_all_multiprocessors_busy():
    for blocks in (1, 3, 8, 64, 131, 256, 1000):
        n = splits_of(blocks, 2**17)
        waves = blocks * n / 132
        assert waves / np.ceil(waves) >= 0.94
        assert n == 1 or 2**17 / n >= 512
    assert splits_of(8, 512) == 1


def test_which_says_so(monkeypatch):
    monkeypatch.setattr(attention, "default_device", lambda: HOPPER)
    q, k = jnp.ones((1, 2, 32, 128), jnp.bfloat16), jnp.ones((1, 32768, 8, 128), jnp.bfloat16)
    choice = which(q, k, k, mask_mod=lambda b, h, q, k: q + 32766 >= k)
    assert choice == ("mosaic_gpu", "the decoding kernel takes all of it, its keys cut into 16")
    assert which(q[:, :, :8], k[:, :256], k[:, :256]).why == "a kernel takes all of it"


def test_by_name_it_runs_or_says_what_is_in_the_way():
    attend, args = problem(1)
    with pytest.raises(NotImplementedError, match="the program is for cpu"):
        attend(*args, implementation="mosaic_gpu")
    wide = tuple(x.astype(jnp.float32) for x in args[:3])
    with pytest.raises(NotImplementedError, match="are float32; the tensor cores take"):
        attend(*wide, args[3], implementation="mosaic_gpu")
