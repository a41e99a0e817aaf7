"""Kernels that change arrays where they lie, in a loop: what they leave there is not lost."""

import jax
import jax.numpy as jnp

from xform import causal, flex_attention
from xform._hlo import compile_for, parse


def test_what_a_loop_saves_of_a_kernel_that_changes_its_operand_is_that_operand():
    """XLA would run the kernel on the saved part of a stack, which is not where its operand lies.

    A kernel that then writes nothing, as the one that repairs infinities does, would leave there
    what was there before: without a word, gradients would be those of other numbers.
    """
    layers, T, D = 3, 512, 64

    def attention(x, w):
        q, k, v = ((x @ w).reshape(1, T, -1, D) for w in w)
        return x + flex_attention(q, k, v, mask_mod=causal()).reshape(x.shape), None

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    loss = lambda x, w: jnp.sum(jax.lax.scan(attention, x, w)[0].astype(jnp.float32))
    x, w = shape(T, 2 * D), [shape(layers, 2 * D, 2 * D)] * 3
    program = parse(str(compile_for("H200", jax.grad(loss, (0, 1)), x, w).as_text()))
    computations = [c.instructions.values() for c in program.computations.values()]
    changes = lambda i: "output_to_operand_aliasing" in i.text
    changing = [c for c in computations if any(map(changes, c))]
    assert changing
    assert not any(i.opcode == "dynamic-update-slice" for c in changing for i in c)
