"""Beside PyTorch's FlexAttention, compiled, on one GPU: values and gradients of twelve mods.

Both run in the dtype of the operands and are judged by dense attention in float64: xform may be off
by twice what FlexAttention is off by, and one rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as
from tests.primitives import test_torch as small

# PyTorch's own warnings, of what it will change, are no failures of ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LENGTH = 256


@pytest.fixture(scope="module", autouse=True)
def torch():
    """PyTorch, in this process; imported late, since it is not everywhere."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return torch


@pytest.fixture(autouse=True)
def _length(monkeypatch):
    """Captures of the small problems grow with the length."""
    grow = {small.T: LENGTH, 2 * small.T - 1: 2 * LENGTH - 1}
    longer = {
        name: {n: tuple(grow.get(size, size) for size in shape) for n, shape in shapes.items()}
        for name, shapes in small.CAPTURES.items()
    }
    monkeypatch.setattr(small, "CAPTURES", longer)
    monkeypatch.setattr(small, "D", 64)
    monkeypatch.setattr(small, "V", 64)


def by_torch(torch, name, x):
    """Results and gradients of compiled FlexAttention, as numpy arrays."""
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        flex_attention,
    )

    from tests.primitives.torch_judge import MODS, joined

    put = lambda n, a: torch.from_numpy(a if n == "ids" else a.astype(np.float32)).cuda()
    x = {n: put(n, a).to(torch.bfloat16) if n in "qkv" else put(n, a) for n, a in x.items()}
    x = {n: a.requires_grad_(a.is_floating_point()) for n, a in x.items()}
    mod = joined(*MODS[name]({n: a for n, a in x.items() if n not in "qkv"}))
    attend = torch.compile(flex_attention)
    out, lse = attend(
        *(x[n] for n in "qkv"), score_mod=mod, enable_gqa=True, return_lse=True,
        kernel_options={"num_stages": 1},  # gradients of captures take the memory of the others
    )  # fmt: skip
    (torch.sin(out.float()).sum() + torch.cos(lse).sum()).backward()
    grads = {f"d{n}": a.grad for n, a in x.items() if a.grad is not None}
    wide = lambda a: a.detach().float().cpu().numpy()
    return {n: wide(a) for n, a in {"out": out, "lse": lse, **grads}.items()}


def rounded(name):
    """Operands: q, k and v in bfloat16, captures in float32, ids as they are."""
    dtypes = dict.fromkeys("qkv", jnp.bfloat16) | {"ids": np.int64}
    return {n: a.astype(dtypes.get(n, np.float32)) for n, a in small.operands(name, LENGTH).items()}


@pytest.mark.parametrize("name", small.MODS)
def test_values_and_gradients_are_as_right_as_flex_attentions(name, torch):
    x = rounded(name)
    found = jax.jit(lambda x: small.results(name, x))(x)
    with jax.enable_x64(True):
        wide = {n: a if n == "ids" else a.astype(np.float64) for n, a in x.items()}
        dense = jax.jit(lambda x: small.results(name, x, "reference"))
        true = jax.tree.map(np.asarray, dense(wide))
    judge = by_torch(torch, name, x)
    assert_as_right_as(found, {n: judge[n] for n in found}, true)
