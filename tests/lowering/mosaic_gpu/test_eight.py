"""The forward kernel in 8 bits without a GPU: compiled for one, and run in the interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lowering.mosaic_gpu.test_kernel import Interpreted, compiled, spills
from xform import causal, flex_attention
from xform._compat import found_races
from xform.lowering import _eight as eight
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._narrow import in_eight
from xform.lowering.mosaic_gpu._twins import in_order
from xform.primitives import attention

SLOW = pytest.mark.slow
SPILLED = {"soft cap": 392, "documents": 136, "alibi": 44}
"""Bytes of registers that go to memory, of 960 a thread; else 0."""


@pytest.mark.parametrize(
    ("mods", "size"),
    [("causal", 128), *[pytest.param(*x, marks=SLOW) for x in (
        ("no mods", 128), ("no mods", 64), ("soft cap", 128), ("alibi", 128), ("table", 128),
        ("documents", 96), ("rows and columns", 128), ("pairs", 128),
    )]],
)  # fmt: skip
def test_compiles_for_an_h200_with_its_values_in_registers(mods, size, tmp_path):
    call = f"partial(flex_attention, format='e4m3', **MODS['{mods}'])"
    printed, reports = compiled(call, size, "bfloat16", tmp_path)
    masked = "mask" in mods or mods in ("causal", "soft cap", "alibi", "documents", "pairs")
    assert f"kernels: {5 if masked else 4} " in printed
    assert max(spills(reports)) <= SPILLED.get(mods, 0)


def test_arrays_are_those_that_are_rounded_everywhere():
    """To the bit, in the order of the kernel; a last block that is not whole, and zeros."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 200, 1, 64), jnp.bfloat16)
    v = v.at[:, :128].multiply(50).at[:, 128:].set(0)
    found = in_eight(q, k, v, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert not found_races()
    wide = lambda x: np.asarray(x, np.float32)
    blocks = np.repeat(wide(found.of_keys), 128, -1)[..., :200].swapaxes(1, 2)[..., None]
    exponents, inverses = wide(found.of_values)[0, 0]
    assert np.array_equal(inverses, 2.0**-exponents)
    rq, rk, rv = (wide(x) for x in eight.rounded(q, k, v))
    ordered = lambda x: wide(in_order(jnp.asarray(x)))
    of_queries = wide(found.of_queries)[..., :200].swapaxes(1, 2)[..., None]
    assert np.array_equal(wide(found.q) * of_queries, ordered(rq))
    assert np.array_equal(wide(found.k) * blocks, ordered(rk))
    turned = np.pad(rv[0, :, 0].T, ((0, 0), (0, 56)))
    assert np.array_equal(wide(found.v)[0, 0] * np.repeat(2.0**exponents, 128), ordered(turned))


CASES = {
    "causal": ((1, 130, 300, 2, 1, 16, 16), {"mask_mod": causal()}),
    "odd sizes": ((1, 37, 200, 2, 2, 40, 24), {}),
    "a score": (
        (1, 70, 260, 2, 2, 32, 16), {"score_mod": lambda s, b, h, q, k: s - 0.01 * jnp.abs(q - k)}
    ),
    "dropout": (
        (1, 70, 260, 2, 2, 16, 16), {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    ),
    "a negative scale": ((1, 70, 260, 1, 1, 16, 16), {"scale": -0.3}),
    "many tiles": ((1, 130, 1100, 1, 1, 16, 16), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["causal", *[pytest.param(n, marks=SLOW) for n in CASES if n != "causal"]]
)
def test_values_in_the_interpreter(name, monkeypatch):
    """As near to attention of the rounded arrays as the emulation; blocks of values differ."""
    (b, t, s, h, kv, d, dv), options = CASES[name]
    shapes = (b, t, h, d), (b, s, kv, d), (b, s, kv, dv)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = map(lambda key, n: jax.random.normal(key, n, jnp.bfloat16), keys, shapes)
    v = v.at[:, 128:256].multiply(100).at[:, -1:].set(0)

    def run(dtype=jnp.bfloat16, **how: Any):
        arrays = (x.astype(dtype) for x in (q, k, v))
        out, aux = flex_attention(*arrays, format="e4m3", aux="lse", **how, **options)
        return [np.asarray(x, np.float64) for x in (out, aux.lse)]

    true, emulated = run(jnp.float32, implementation="reference"), run()
    monkeypatch.setattr(attention, "flex_attention_p", Interpreted)
    found = run()
    assert not found_races()
    size = lambda x: np.sqrt(np.square(x).mean())
    assert size(found[0] - true[0]) < 1.1 * size(emulated[0] - true[0])
    assert size(found[1] - true[1]) < 1e-5


@SLOW
def test_hidden_values_that_are_not_finite(monkeypatch):
    """They are met by a second kernel, in 16 bits."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 140, 1, 16), jnp.bfloat16)
    hide = lambda b, h, i, j: j != 5
    attend = lambda v: flex_attention(q, k, v, mask_mod=hide, format="e4m3")
    clean = attend(v)
    monkeypatch.setattr(attention, "flex_attention_p", Interpreted)
    spoilt = attend(v.at[:, 5].set(jnp.nan))
    assert not found_races()
    error = jnp.linalg.norm((spoilt - clean).astype(jnp.float32))
    assert error < 0.1 * jnp.linalg.norm(clean.astype(jnp.float32))
