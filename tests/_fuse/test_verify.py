"""The compiled program is read: one loop over blocks, nothing larger than a block."""

import jax
import jax.numpy as jnp
import pytest

from tests._fuse.subjects import SUBJECTS, normal, with_gradients
from xform import FusionError, fuse
from xform._fuse import _verify
from xform._hlo import parse
from xform.lowering import row_blocks


def test_one_loop_a_kernel_and_small_temporaries():
    f, arguments, argnums = SUBJECTS["residual + RMSNorm"]
    args = arguments(512, jnp.bfloat16)
    for g, kernels in ((fuse(f), 1), (with_gradients(fuse(f), argnums), 2)):
        compiled = jax.jit(g).lower(*args).compile()
        computations = parse(str(compiled.as_text())).computations.values()
        opcodes = [i.opcode for c in computations for i in c.instructions.values()]
        assert opcodes.count("while") == kernels
    # Beside the results only blocks: a few of 32,768 elements, where the arrays have 68,096.
    temporaries = jax.jit(fuse(f)).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 8 * 4 * row_blocks.ELEMENTS


def test_a_larger_temporary_is_an_error(monkeypatch):
    """As if XLA had made one: blocks are allowed no more than a byte an element."""
    monkeypatch.setattr(_verify, "_WIDEST", 1)
    with pytest.raises(FusionError, match=r"at most .* bytes a value, and XLA compiled"):
        jax.jit(fuse(lambda x: jnp.exp(x - x.max(-1, keepdims=True))))(normal(0, (300, 700)))
