"""Kernels in a loop over layers: each runs once, and nothing that it leaves is lost."""

import re

import jax
import jax.numpy as jnp

from xform import causal, flex_attention, fuse
from xform._hlo import compile_for, parse


def test_what_a_loop_saves_of_a_kernel_is_what_it_made_in_its_one_run():
    """XLA would run kernels on the saved part of a stack, and again for who else reads the result.

    That part is not where the operand of a kernel lies that changes it in place. Where such a
    kernel writes nothing, as the one that repairs infinities does, there would be what was there
    before: without a word, gradients would be those of other numbers.
    """
    layers, T, D = 3, 512, 64

    def layer(x, w):
        q, k, v = ((x @ w).reshape(1, T, -1, D) for w in w)
        out = flex_attention(q, k, v, mask_mod=causal()).reshape(x.shape)
        return x + fuse(lambda x: x / (1 + abs(x)))(out) @ w[0], None

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    loss = lambda x, w: jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))
    x, w = shape(T, 2 * D), [shape(layers, 2 * D, 2 * D)] * 3
    program = parse(str(compile_for("H200", jax.grad(loss, (0, 1)), x, w).as_text()))
    computations = [c.instructions.values() for c in program.computations.values()]
    kernels = [
        re.search(r'op_name="[^"]*?([^/"]*)/mpmd_map"', i.text)[1]
        for c in computations
        for i in c
        if 'custom_call_target="mosaic_gpu' in i.text
    ]
    attention = ["flex_attention", "flex_attention_careful", "flex_attention_backward"]
    assert sorted(kernels) == sorted([*attention, "fused", "fused"])
    changing = [c for c in computations if any("output_to_operand_alias" in i.text for i in c)]
    assert changing
    assert not any(i.opcode == "dynamic-update-slice" for c in changing for i in c)
