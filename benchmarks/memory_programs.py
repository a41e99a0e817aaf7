"""The programs whose memory `memory.py` predicts, by name: what a user compiles.

Models forward, with their gradients and as steps with Adam that give parameters and state away;
single operations after them. It is a list, one entry a program, and so long.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import test_memory as models
from memory_models import (
    S,
    attention_args,
    attention_loss,
    causal_att,
    cond_net,
    contrastive,
    conv,
    conv1d_net,
    cross_entropy,
    cross_entropy_one_hot,
    dropout_mlp,
    embed_only,
    embedding_args,
    equinox_convolutions,
    equinox_mlp,
    expert_args,
    f32,
    fourier_convolution,
    gan,
    gpt_args,
    gqa_args,
    graph_net,
    group_norm,
    group_norm_args,
    group_norm_net,
    gru,
    gru_args,
    heat,
    i32,
    int8_product,
    kmeans,
    lenet,
    lenet_args,
    lstm,
    lstm_args,
    maml,
    max_pool,
    mean_pool,
    mixer,
    mixer_args,
    mlp,
    mlp_args,
    mlp_tanh,
    moe,
    moe_args,
    moe_unrolled,
    nnx_attention,
    nnx_mlp,
    resblock,
    rk4,
    rope_gqa,
    routed_args,
    sinkhorn,
    state_space,
    swiglu,
    swiglu_args,
    unet,
    unet_args,
    unrolled_gpt,
    vae,
    vae_args,
    vit,
    vit_args,
    while_newton,
)

from xform import causal, flex_attention, linear_cross_entropy

PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {}
"""Of each program its function, jitted or not, and its arguments."""


def add(name, make):
    PROGRAMS[name] = make


def build(kind, loss, params, *batch, optimizer=None):
    """A loss forward, with its gradients, or as a step."""
    if kind == "fwd":
        return loss, params, *batch
    if kind == "vag":
        return jax.value_and_grad(loss), params, *batch
    optimizer = optimizer or optax.adam(1e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, params, jax.eval_shape(optimizer.init, params), *batch


def two(name, loss, args, kinds=("fwd", "vag")):
    for kind in kinds:
        add(f"{name} {kind}", lambda kind=kind: build(kind, loss, *args()))


three = partial(two, kinds=("fwd", "vag", "step"))


def whole(name, make):
    """A model whose loss is made together with its parameters."""
    for kind in ("fwd", "vag", "step"):
        add(f"{name} {kind}", lambda kind=kind: build(kind, *make()))


whole("example", lambda: (models.example_loss, *models.example()))
whole("eqx mlp", equinox_mlp)
whole("eqx conv", equinox_convolutions)
whole("nnx mlp", nnx_mlp)
whole("nnx att", nnx_attention)
for batch in (1, 2, 32):
    tokens = f32(batch, 128, 256)
    add(f"gpt scan, batch {batch}", partial(build, "vag", models.gpt, gpt_args()[0], tokens))
for batch in (1, 64):
    images = f32(batch, 128, 128, 3)
    add(f"vit, batch {batch}", partial(build, "vag", vit, vit_args()[0], images))
two("moe swiglu", moe, lambda: (moe_args(8, 256, 512, 3), f32(1024, 256)))
two(
    "moe swiglu remat", partial(moe, wrap=jax.checkpoint),
    lambda: (moe_args(8, 256, 512, 3), f32(1024, 256)),
)  # fmt: skip
two(
    "moe swiglu bf16", moe,
    lambda: models.bfloat16((moe_args(16, 512, 256, 2), f32(2048, 512))),
)  # fmt: skip
two("moe unrolled", moe_unrolled, lambda: ([moe_args(4, 256, 1024)] * 2, f32(512, 256)))
two(
    "moe unrolled remat", partial(moe_unrolled, wrap=jax.checkpoint),
    lambda: ([moe_args(4, 256, 1024)] * 2, f32(512, 256)),
)  # fmt: skip
two("routed bf16", models.routed, lambda: models.bfloat16(routed_args()))
three("gpt scan", models.gpt, gpt_args)
three("gpt scan remat", partial(models.gpt, wrap=jax.checkpoint), gpt_args)
three("gpt unrolled", unrolled_gpt, gpt_args)
three("gpt unrolled remat", partial(unrolled_gpt, wrap=jax.checkpoint), gpt_args)
three("vit", vit, vit_args)
three("vit remat", partial(vit, wrap=jax.checkpoint), vit_args)
three("routed", models.routed, routed_args)
three("routed remat", partial(models.routed, wrap=jax.checkpoint), routed_args)
three("experts", models.experts, expert_args)
three("experts remat", jax.checkpoint(models.experts), expert_args)
two("dropout mlp", dropout_mlp, lambda: ([f32(512, 512)] * 4, f32(512, 512), jax.random.key(0)))
add(
    "dropout alone",
    lambda: (
        lambda x, k: jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0),
        f32(1024, 1024),
        jax.random.key(0),
    ),
)
two("lenet max", lenet, lenet_args)
two("lenet avg", partial(lenet, pool=mean_pool), lenet_args)
add("maxpool grad", lambda: (jax.grad(lambda x: max_pool(x).sum()), f32(16, 64, 64, 32)))
add("maxpool fwd", lambda: (max_pool, f32(16, 64, 64, 32)))
add(
    "maxpool3 s2 grad",
    lambda: (
        jax.grad(
            lambda x: (
                jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
                ** 2
            ).sum()
        ),
        f32(16, 64, 64, 32),
    ),
)
two("groupnorm net", group_norm_net, group_norm_args)
add("groupnorm alone", lambda: (group_norm, f32(8, 32, 32, 64)))
add("groupnorm grad", lambda: (jax.grad(lambda x: (group_norm(x) ** 3).sum()), f32(8, 32, 32, 64)))
add("layernorm alone", lambda: (models.norm, f32(4096, 1024)))
add("layernorm grad", lambda: (jax.grad(lambda x: (models.norm(x) ** 3).sum()), f32(4096, 1024)))
two(
    "resblock", resblock, lambda: ([(f32(3, 3, 64, 64), f32(3, 3, 64, 64))] * 3, f32(8, 32, 32, 64))
)
two("unet", unet, unet_args)
add(
    "batch norms vag",
    lambda: (
        jax.value_and_grad(models.batch_normed),
        [f32(3, 3, 3, 64), *[f32(3, 3, 64, 64)] * 4],
        f32(8, 32, 32, 3),
    ),
)
two("depthwise", models.depthwise, lambda: (f32(3, 3, 1, 64), f32(8, 32, 32, 64)))
two(
    "conv grouped",
    lambda w, x: (conv(x, w, feature_group_count=4) ** 2).mean(),
    lambda: (f32(3, 3, 16, 64), f32(8, 32, 32, 64)),
)
two(
    "conv dilated",
    lambda w, x: (conv(x, w, rhs_dilation=(2, 2)) ** 2).mean(),
    lambda: (f32(3, 3, 64, 64), f32(8, 32, 32, 64)),
)
two(
    "conv transpose",
    lambda w, x: (
        jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=models.DIMS) ** 2
    ).mean(),
    lambda: (f32(4, 4, 64, 32), f32(8, 32, 32, 64)),
)
two(
    "conv strided",
    lambda w, x: (conv(x, w, 2) ** 2).mean(),
    lambda: (f32(3, 3, 64, 128), f32(8, 32, 32, 64)),
)
two("conv1d", conv1d_net, lambda: ([f32(5, 64, 64)] * 4, f32(16, 512, 64)))
two(
    "conv nchw",
    lambda w, x: (jax.lax.conv(x, w, (1, 1), "SAME") ** 2).mean(),
    lambda: (f32(64, 64, 3, 3), f32(8, 64, 32, 32)),
)
two("lstm", lstm, lstm_args)
two("lstm remat", lambda p, x: jax.checkpoint(lstm)(p, x), lstm_args)
two("gru", gru, gru_args)
add("attention grad", lambda: (jax.grad(attention_loss, (0, 1, 2)), *attention_args()))
add("causal att grad", lambda: (jax.grad(causal_att, (0, 1, 2)), *attention_args()))
add("causal att fwd", lambda: (causal_att, *attention_args()))
two("rope gqa", rope_gqa, gqa_args)
add(
    "flex fwd",
    lambda: (
        lambda q, k, v: flex_attention(q, k, v, mask_mod=causal()),
        *[f32(2, 1024, 8, 64)] * 3,
    ),
)
add(
    "flex grad",
    lambda: (
        jax.grad(
            lambda q, k, v: (flex_attention(q, k, v, mask_mod=causal()) ** 2).sum(), (0, 1, 2)
        ),
        *[f32(2, 1024, 8, 64)] * 3,
    ),
)
add(
    "flex small grad",
    lambda: (
        jax.grad(lambda q, k, v: flex_attention(q, k, v).sum(), (0, 1, 2)),
        *[f32(1, 256, 4, 64)] * 3,
    ),
)
add(
    "lce fwd",
    lambda: (
        lambda x, w, y: jax.tree.leaves(linear_cross_entropy(x, w, y))[0].mean(),
        f32(2048, 256),
        f32(256, 8192),
        i32(2048),
    ),
)
add(
    "lce grad",
    lambda: (
        jax.grad(lambda x, w, y: jax.tree.leaves(linear_cross_entropy(x, w, y))[0].mean(), (0, 1)),
        f32(2048, 256),
        f32(256, 8192),
        i32(2048),
    ),
)
add("softmax", lambda: (jax.nn.softmax, f32(2048, 2048)))
add("softmax grad", lambda: (jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum()), f32(2048, 2048)))
add("logsumexp grad", lambda: (jax.grad(lambda x: jax.nn.logsumexp(x, -1).sum()), f32(2048, 2048)))
two("xent take", cross_entropy, lambda: (f32(256, 4096), f32(1024, 256), i32(1024)))
two("xent onehot", cross_entropy_one_hot, lambda: (f32(256, 4096), f32(1024, 256), i32(1024)))
three("embedded", models.embedded, embedding_args)
two("embed only", embed_only, lambda: (f32(8000, 256), i32(4096)))
three("mlp relu", mlp, mlp_args)
three("mlp relu remat", lambda p, x: jax.checkpoint(mlp)(p, x), mlp_args)
add("mlp sgd", lambda: build("step", mlp, *mlp_args(), optimizer=optax.sgd(0.1)))
add(
    "mlp adamw clip",
    lambda: build(
        "step",
        mlp,
        *mlp_args(),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
)
add("mlp adafactor", lambda: build("step", mlp, *mlp_args(), optimizer=optax.adafactor(1e-3)))
add(
    "mlp vmap ensemble",
    lambda: (
        jax.vmap(jax.value_and_grad(mlp)),
        jax.tree.map(lambda x: S((4, *x.shape), x.dtype), mlp_args()[0]),
        f32(4, 256, 512),
    ),
)
add(
    "mlp per-example grads",
    lambda: (jax.vmap(jax.grad(mlp_tanh), (None, 0)), [f32(128, 128)] * 3, f32(64, 1, 128)),
)
add("mlp bf16 vag", lambda: (jax.value_and_grad(mlp), *models.bfloat16(mlp_args())))
add(
    "mlp mixed vag",
    lambda: (
        jax.value_and_grad(
            lambda p, x: mlp(
                jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16)
            ).astype(jnp.float32)
        ),
        *mlp_args(),
    ),
)
add(
    "mlp f64-like f16 vag",
    lambda: (jax.value_and_grad(mlp), *jax.tree.map(lambda x: S(x.shape, jnp.float16), mlp_args())),
)
add(
    "mlp jvp",
    lambda: (lambda p, x, t: jax.jvp(lambda x: mlp(p, x), (x,), (t,)), *mlp_args(), f32(256, 512)),
)
add(
    "mlp hvp fwdrev",
    lambda: (
        lambda w, x, v: jax.jvp(jax.grad(lambda w: mlp_tanh(w, x)), (w,), (v,))[1],
        [f32(512, 512)] * 3,
        f32(256, 512),
        [f32(512, 512)] * 3,
    ),
)
add(
    "mlp hvp revrev",
    lambda: (
        lambda w, x, v: jax.grad(
            lambda w: sum(map(jnp.vdot, jax.grad(lambda w: mlp_tanh(w, x))(w), v))
        )(w),
        [f32(512, 512)] * 3,
        f32(256, 512),
        [f32(512, 512)] * 3,
    ),
)
add("scan layers grad", lambda: (jax.grad(models.layers), f32(8, 512, 512), f32(256, 512)))
add(
    "scan layers remat",
    lambda: (
        jax.grad(
            lambda w, x: (
                jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0] ** 2
            ).sum()
        ),
        f32(8, 512, 512),
        f32(256, 512),
    ),
)
add(
    "scan layers hvp",
    lambda: (
        lambda w, x, v: jax.jvp(jax.grad(lambda w: models.layers(w, x)), (w,), (v,))[1],
        f32(4, 256, 256),
        f32(256, 256),
        f32(4, 256, 256),
    ),
)
three("swiglu", swiglu, swiglu_args)
add("jacfwd", lambda: (jax.jacfwd(lambda x, w: jnp.tanh(x @ w)), f32(64), f32(64, 256)))
add(
    "jacrev",
    lambda: (jax.jacrev(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w)), f32(256), f32(256, 256)),
)
add(
    "hessian",
    lambda: (jax.hessian(lambda x, w: (jnp.tanh(x @ w) ** 2).sum()), f32(128), f32(128, 128)),
)
add("rk4 fwd", lambda: (rk4, f32(256, 256), f32(256, 256)))
add("rk4 grad", lambda: (jax.grad(rk4, (0, 1)), f32(256, 256), f32(256, 256)))
add("sinkhorn", lambda: (sinkhorn, f32(512, 512)))
add("sinkhorn grad", lambda: (jax.grad(lambda c: (sinkhorn(c) * c).sum()), f32(512, 512)))
add("kmeans", lambda: (kmeans, f32(8192, 32), f32(64, 32)))
add(
    "pairwise",
    lambda: (lambda x, y: jnp.sqrt(((x[:, None] - y) ** 2).sum(-1)), f32(512, 64), f32(512, 64)),
)
add("heat", lambda: (heat, f32(512, 512)))
add("heat grad", lambda: (jax.grad(lambda u: (heat(u) ** 2).sum()), f32(512, 512)))
add(
    "cond net",
    lambda: (
        cond_net,
        dict(a=f32(512, 512), b=f32(512, 512), c=f32(512, 512)),
        f32(1024, 512),
        S((), jnp.bool_),
    ),
)
add(
    "cond net grad",
    lambda: (
        jax.grad(cond_net),
        dict(a=f32(512, 512), b=f32(512, 512), c=f32(512, 512)),
        f32(1024, 512),
        S((), jnp.bool_),
    ),
)
add("while", lambda: (while_newton, f32(512, 512), f32(512, 512)))
add("fft", lambda: (lambda x: jnp.fft.fft2(x), S((256, 256), jnp.complex64)))
add(
    "fft conv grad",
    lambda: (
        jax.grad(lambda k, x: (fourier_convolution(k, x) ** 2).sum(), (0, 1)),
        f32(256, 64),
        f32(16, 256, 64),
    ),
)
add(
    "complex",
    lambda: (
        lambda a, b: jnp.abs(jnp.exp(1j * (a @ b))),
        S((256, 256), jnp.complex64),
        S((256, 256), jnp.complex64),
    ),
)
add("sort", lambda: (lambda x: jnp.sort(x, -1), f32(1024, 1024)))
add("argsort", lambda: (lambda x: jnp.argsort(x, -1), f32(1024, 1024)))
add(
    "sort grad",
    lambda: (jax.grad(lambda x: (jnp.sort(x, -1) * jnp.arange(1024.0)).sum()), f32(512, 1024)),
)
add("top_k", lambda: (lambda x: jax.lax.top_k(x, 16), f32(1024, 1024)))
add("median", lambda: (lambda x: jnp.median(x, -1), f32(512, 1024)))
add("unique-ish bincount", lambda: (lambda x: jnp.bincount(x, length=1000), i32(100000)))
add("gather rows", lambda: (lambda x, i: x[i] * 2, f32(4096, 256), i32(8192)))
add(
    "scatter add",
    lambda: (lambda x, i, y: x.at[i].add(y), f32(4096, 256), i32(2048), f32(2048, 256)),
)
add(
    "scatter set donated",
    lambda: (
        jax.jit(lambda x, i, y: x.at[i].set(y), donate_argnums=0),
        f32(4096, 256),
        i32(2048),
        f32(2048, 256),
    ),
)
add(
    "take along",
    lambda: (lambda x, i: jnp.take_along_axis(x, i, 1) + 1, f32(1024, 1024), i32(1024, 1024)),
)
add(
    "dus cache",
    lambda: (
        lambda c, x, i: jax.lax.dynamic_update_slice(c, x, (i, 0)),
        f32(8192, 256),
        f32(1, 256),
        i32(),
    ),
)
add("cumsum", lambda: (lambda x: jnp.cumsum(x, 0), f32(1024, 1024)))
add("cumsum grad", lambda: (jax.grad(lambda x: (jnp.cumsum(x, 1) ** 2).sum()), f32(1024, 1024)))
add("cumlogsumexp", lambda: (lambda x: jax.lax.cumlogsumexp(x, axis=0), f32(1024, 512)))
add("cummax", lambda: (lambda x: jax.lax.cummax(x, axis=1), f32(1024, 512)))
add("assoc scan", lambda: (state_space, f32(64), f32(64), f32(64), f32(2048, 64)))
add(
    "assoc scan grad",
    lambda: (jax.grad(state_space, (0, 1, 2, 3)), f32(64), f32(64), f32(64), f32(2048, 64)),
)
add(
    "gan",
    lambda: (
        jax.value_and_grad(gan),
        ([f32(128, 512), f32(512, 784)], [f32(784, 512), f32(512, 1)]),
        f32(256, 784),
        f32(256, 128),
    ),
)
three("vae", vae, vae_args)
two("gnn", graph_net, lambda: ([f32(128, 128)] * 3, f32(2048, 128), i32(8192), i32(8192)))
add(
    "maml grad",
    lambda: (jax.grad(maml), [f32(256, 512), f32(512, 256)], f32(512, 256), f32(512, 256)),
)
two("mixer", mixer, mixer_args)
two("contrastive", contrastive, lambda: (f32(512, 256), f32(512, 512), f32(512, 512)))
add("int8 dot", lambda: (int8_product, S((1024, 1024), jnp.int8), S((1024, 1024), jnp.int8)))
add("matmul chain", lambda: (lambda a, b, c: a @ b @ c, *[f32(1024, 1024)] * 3))
add("matmul add", lambda: (lambda a, b, c: a @ b + c, *[f32(1024, 1024)] * 3))
add("matmul T", lambda: (lambda a, b: (a.T @ b).T + 1, *[f32(1024, 1024)] * 2))
add(
    "einsum 4d",
    lambda: (
        lambda a, b: jnp.einsum("abcd,acde->bcae", a, b),
        f32(8, 16, 32, 64),
        f32(8, 32, 64, 48),
    ),
)
add(
    "batched matmul grad",
    lambda: (
        jax.grad(lambda a, b: (jnp.tanh(a @ b) ** 2).sum(), (0, 1)),
        f32(16, 256, 128),
        f32(16, 128, 256),
    ),
)
add(
    "elementwise chain",
    lambda: (lambda x, y: jnp.sin(x) * jnp.cos(y) + jnp.exp(x * y), *[f32(1024, 1024)] * 2),
)
add(
    "transpose reshape",
    lambda: (lambda x: x.reshape(64, 16, 1024).transpose(2, 0, 1) * 2, f32(1024, 1024)),
)
add(
    "concat pad",
    lambda: (
        lambda x, y: jnp.pad(jnp.concatenate([x, y], 0) ** 2, ((1, 1), (2, 2))),
        *[f32(512, 1024)] * 2,
    ),
)
add("reduce two axes", lambda: (lambda x: (x.sum(0), x.mean(1), x.max()), f32(2048, 1024)))
add("std and var", lambda: (lambda x: (x - x.mean(0)) / x.std(0), f32(2048, 1024)))
add("random normal", lambda: (lambda k: jax.random.normal(k, (1024, 1024)), jax.random.key(0)))
add("random perm", lambda: (lambda k: jax.random.permutation(k, 100000), jax.random.key(0)))
add(
    "random choice",
    lambda: (lambda k, p: jax.random.categorical(k, p), jax.random.key(0), f32(1024, 1000)),
)
add("cholesky", lambda: (lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(512)), f32(512, 512)))
add("solve", lambda: (jnp.linalg.solve, f32(512, 512), f32(512, 64)))
add(
    "cholesky grad",
    lambda: (jax.grad(lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(512)).sum()), f32(512, 512)),
)
add(
    "triangular solve",
    lambda: (
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
        f32(512, 512),
        f32(512, 512),
    ),
)
add("qr", lambda: (jnp.linalg.qr, f32(512, 512)))
add("eigh", lambda: (jnp.linalg.eigh, f32(256, 256)))
add("svd", lambda: (lambda a: jnp.linalg.svd(a, full_matrices=False), f32(256, 256)))
add(
    "image resize",
    lambda: (lambda x: jax.image.resize(x, (8, 128, 128, 16), "bilinear"), f32(8, 64, 64, 16)),
)
add("map", lambda: (lambda x: jax.lax.map(lambda r: jnp.outer(r, r).sum(0), x), f32(64, 512)))
add(
    "vmap while",
    lambda: (
        jax.vmap(
            lambda x: jax.lax.while_loop(
                lambda c: c[0] < 10.0, lambda c: (c[0] + 1, c[1] * 0.9), (x[0], x)
            )[1]
        ),
        f32(256, 1024),
    ),
)
add(
    "scan stack",
    lambda: (
        lambda x: jax.lax.scan(lambda c, x: (c + x, jnp.outer(c, x)), jnp.zeros(64), x)[1],
        f32(128, 64),
    ),
)
add(
    "switch",
    lambda: (
        lambda i, x, w: jax.lax.switch(
            i, [lambda x: x @ w, lambda x: jnp.tanh(x @ w) @ w, lambda x: x + 1], x
        ),
        i32(),
        f32(512, 512),
        f32(512, 512),
    ),
)
add(
    "ema tree",
    lambda: (
        jax.jit(lambda a, b: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, a, b), donate_argnums=0),
        [f32(512, 512)] * 8,
        [f32(512, 512)] * 8,
    ),
)
add(
    "grad accumulation",
    lambda: (
        lambda p, xs: jax.lax.scan(
            lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(mlp)(p, x)), None),
            jax.tree.map(jnp.zeros_like, p),
            xs,
        )[0],
        mlp_args()[0],
        f32(8, 128, 512),
    ),
)
add(
    "power iteration",
    lambda: (
        lambda a, v: jax.lax.fori_loop(
            0, 20, lambda i, v: (lambda u: u / jnp.linalg.norm(u))(a @ v), v
        ),
        f32(1024, 1024),
        f32(1024),
    ),
)
add("kron", lambda: (jnp.kron, f32(32, 32), f32(32, 32)))
add("histogram", lambda: (lambda x: jnp.histogram(x, bins=64)[0], f32(100000)))
add("searchsorted", lambda: (jnp.searchsorted, f32(1000), f32(100000)))
add("interp", lambda: (jnp.interp, f32(100000), f32(1000), f32(1000)))
add("conv fft 1d", lambda: (lambda x, k: jnp.convolve(x, k, "same"), f32(8192), f32(129)))
