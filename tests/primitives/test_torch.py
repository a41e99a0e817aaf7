"""PyTorch as an outside judge: twelve mods, values and gradients, in float64.

It runs in a Python of its own, named by `XFORM_TORCH_PYTHON`; see `torch_judge.py` beside this.
"""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents, prefix, sliding_window

TORCH = os.environ.get("XFORM_TORCH_PYTHON")
B, T, H, K, D, V = 2, 32, 4, 2, 8, 8

MODS = {
    "plain": lambda c: (None, None),
    "causal": lambda c: (None, causal()),
    "window": lambda c: (None, sliding_window(7)),
    "prefix": lambda c: (None, causal() | prefix(5)),
    "documents": lambda c: (None, documents(c["ids"]) & causal()),
    "dilated": lambda c: (None, causal() & (lambda b, h, q, k: (q - k) % 3 == 0)),
    "alibi": lambda c: (lambda s, b, h, q, k: s - c["slopes"][h] * (q - k), None),
    "soft cap": lambda c: (lambda s, b, h, q, k: 2 * jnp.tanh(s / 2), causal()),
    "relative": lambda c: (
        lambda s, b, h, q, k: s + c["table"][h, q - k + c["table"].shape[1] // 2], None,
    ),
    "rows and columns": lambda c: (
        lambda s, b, h, q, k: s * c["rows"][b, q] + c["columns"][h, k], None,
    ),
    "pair bias": lambda c: (lambda s, b, h, q, k: s + c["pairs"][h, q, k], causal()),
    "by head": lambda c: (
        lambda s, b, h, q, k: jnp.where(h % 2 == 0, s, s * c["factor"][h]),
        causal() & (lambda b, h, q, k: q - k < 4 * (h + 1)),
    ),
}  # fmt: skip
CAPTURES = {
    "documents": {"ids": (B, T)}, "alibi": {"slopes": (H,)}, "relative": {"table": (H, 2 * T - 1)},
    "rows and columns": {"rows": (B, T), "columns": (H, T)}, "pair bias": {"pairs": (H, T, T)},
    "by head": {"factor": (H,)},
}  # fmt: skip


def operands(name: str, length: int = T) -> dict[str, np.ndarray]:
    """Random operands and captures of one mod, in torch's layout."""
    rng = np.random.default_rng(len(name))
    shapes = {"q": (B, H, length, D), "k": (B, K, length, D), "v": (B, K, length, V)}
    x = {n: np.asarray(rng.normal(size=s)) for n, s in shapes.items()}
    for capture, shape in CAPTURES.get(name, {}).items():
        if capture == "ids":
            x[capture] = np.sort(rng.integers(0, 4, shape))
        else:
            x[capture] = np.asarray(rng.normal(size=shape))
    return x


def results(name: str, x, implementation: str | None = None) -> dict[str, jax.Array]:
    """What the judge returns, by `flex_attention`."""

    def loss(floats):
        captures = {n: a for n, a in (x | floats).items() if n not in "qkv"}
        score, mask = MODS[name](captures)
        qkv = [floats[n].swapaxes(1, 2) for n in "qkv"]
        mods = {"score_mod": score, "mask_mod": mask}
        out, aux = flex_attention(*qkv, **mods, aux=("lse",), implementation=implementation)
        return jnp.sin(out.astype(aux.lse.dtype)).sum() + jnp.cos(aux.lse[...]).sum(), (
            out,
            aux.lse,
        )

    floats = {n: a for n, a in x.items() if n != "ids"}
    (_, (out, lse)), grads = jax.value_and_grad(loss, has_aux=True)(floats)
    grads = {f"d{n}": g for n, g in grads.items()}
    return {"out": out.swapaxes(1, 2), "lse": lse.swapaxes(1, 2), **grads}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What PyTorch says, by mod and name."""
    if not TORCH:
        pytest.skip("XFORM_TORCH_PYTHON names no Python that has PyTorch")
    folder = tmp_path_factory.mktemp("torch")
    arrays: dict = {f"{n}/{k}": a for n in MODS for k, a in operands(n).items()}
    np.savez(folder / "x.npz", **arrays)
    script = Path(__file__).parent / "torch_judge.py"
    subprocess.run([TORCH, script, folder / "x.npz", folder / "y.npz"], check=True)
    return dict(np.load(folder / "y.npz"))


@pytest.mark.parametrize("name", MODS)
def test_values_and_gradients_are_those_of_pytorch(name, judged):
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.asarray, operands(name))
        unoptimised = {"xla_backend_optimization_level": 0}
        found = jax.jit(lambda x: results(name, x), compiler_options=unoptimised)(x)
    for key, value in found.items():
        true = judged[f"{name}/{key}"]
        scale = np.abs(true).max()
        np.testing.assert_allclose(value, true, rtol=1e-9, atol=1e-9 * scale, err_msg=key)
