"""The compiled program is read: one loop over blocks, nothing larger than a block."""

import jax
import jax.numpy as jnp
import pytest

from tests._fuse.subjects import SUBJECTS, normal
from xform import FusionError, fuse
from xform._fuse import _verify
from xform._hlo import parse
from xform.lowering import row_blocks


def test_one_loop_and_small_temporaries():
    f, arguments, _ = SUBJECTS["residual + RMSNorm"]
    args = arguments(512, jnp.bfloat16)
    compiled = jax.jit(fuse(f)).lower(*args).compile()
    module = parse(compiled.as_text())
    loops = [
        i
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode == "while"
    ]
    assert len(loops) == 1
    # Beside the results only blocks: a few of 32,768 elements, where the arrays have 68,096.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 4 * row_blocks.ELEMENTS


def test_a_larger_temporary_is_an_error(monkeypatch):
    """As if XLA had made one: blocks are allowed no more than a byte an element."""
    monkeypatch.setattr(_verify, "_WIDEST", 1)
    with pytest.raises(FusionError, match=r"at most .* bytes a value, and XLA compiled"):
        jax.jit(fuse(lambda x: jnp.exp(x - x.max(-1, keepdims=True))))(normal(0, (300, 700)))
