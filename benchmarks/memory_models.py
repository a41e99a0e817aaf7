"""The models whose memory `memory.py` predicts, beside those of `tests/test_memory.py`.

Each is a loss of its parameters and a batch; `…_args` gives their shapes.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import test_memory as models
from flax import nnx

S = jax.ShapeDtypeStruct


def f32(*shape):
    return S(shape, jnp.float32)


def i32(*shape):
    return S(shape, jnp.int32)


def moe_layer(x, w):
    """Experts with gates, two for each token: three ragged products."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax((x @ w["router"]).astype(jnp.float32)), 2)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=w["router"].shape[-1])
    rows = x[order // 2]
    h = jax.nn.silu(jax.lax.ragged_dot(rows, w["gate"], sizes))
    h = h * jax.lax.ragged_dot(rows, w["up"], sizes)
    y = jax.lax.ragged_dot(h, w["down"], sizes) * gates.ravel()[order][:, None].astype(x.dtype)
    return x + jnp.zeros_like(x).at[order // 2].add(y), None


def moe(w, x, wrap=lambda f: f):
    return (jax.lax.scan(wrap(moe_layer), x, w)[0].astype(jnp.float32) ** 2).mean()


def moe_unrolled(layers, x, wrap=lambda f: f):
    for w in layers:
        x = wrap(moe_layer)(x, w)[0]
    return (x.astype(jnp.float32) ** 2).mean()


def moe_args(experts, width, hidden, *count):
    up = f32(*count, experts, width, hidden)
    return dict(
        router=f32(*count, width, experts), gate=up, up=up, down=f32(*count, experts, hidden, width)
    )  # fmt: skip


def gpt_args():
    return models.gpt_params(4, 256), f32(8, 128, 256)


def unrolled_gpt(p, x, wrap=lambda f: f):
    def block(x, p):
        q, k, v = ((models.norm(x) @ p[n]).reshape(*x.shape[:2], 8, -1) for n in "qkv")
        a = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd->bthd", a, v).reshape(x.shape) @ p["o"]
        return x + jax.nn.gelu(models.norm(x) @ p["up"]) @ p["down"]

    for i in range(4):
        x = wrap(block)(x, jax.tree.map(lambda w, i=i: w[i], p))
    return (x**2).mean()


def vit_args():
    params = dict(
        blocks=models.gpt_params(4, 192), kernel=f32(16, 16, 3, 192), head=f32(192, 10)
    )  # fmt: skip
    return params, f32(8, 128, 128, 3)


def vit(p, images, wrap=lambda f: f):
    return models.vit(p["blocks"], p["kernel"], p["head"], images, wrap)


def routed_args():
    return dict(router=f32(3, 256, 8), up=f32(3, 8, 256, 512), down=f32(3, 8, 512, 256)), f32(
        1024, 256
    )


def expert_args():
    return dict(router=f32(256, 8), up=f32(8, 256, 512), down=f32(8, 512, 256)), f32(1024, 256)


def dropout_mlp(ws, x, key):
    for i, w in enumerate(ws):
        x = jax.nn.relu(x @ w)
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = jnp.where(keep, x / 0.9, 0)
    return (x**2).mean()


def conv(x, w, s=1, **k):
    return jax.lax.conv_general_dilated(x, w, (s, s), "SAME", dimension_numbers=models.DIMS, **k)


def max_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mean_pool(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


def lenet(ws, x, pool=max_pool):
    for w in ws:
        x = pool(jax.nn.relu(conv(x, w)))
    return (x.mean((1, 2)) ** 2).sum()


def lenet_args():
    return ([f32(3, 3, 3, 32), f32(3, 3, 32, 64), f32(3, 3, 64, 64)], f32(16, 64, 64, 3))


def group_norm(x, g=8):
    y = x.reshape(*x.shape[:-1], g, -1)
    ax = (1, 2, 4)
    m = y.mean(ax, keepdims=True)
    v = y.var(ax, keepdims=True)
    return ((y - m) * jax.lax.rsqrt(v + 1e-5)).reshape(x.shape)


def group_norm_net(ws, x):
    for w in ws:
        x = jax.nn.silu(group_norm(conv(x, w)))
    return (x**2).mean()


def group_norm_args():
    return ([f32(3, 3, 64, 64)] * 3, f32(8, 32, 32, 64))


def resblock(ws, x):
    for a, b in ws:
        x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, a)), b))
    return (x**2).mean()


def unet(p, x):
    a = jax.nn.relu(conv(x, p[0]))
    b = jax.nn.relu(conv(mean_pool(a), p[1]))
    c = jax.nn.relu(conv(mean_pool(b), p[2]))
    up = lambda x: jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    d = jax.nn.relu(conv(jnp.concatenate([up(c), b], -1), p[3]))
    e = conv(jnp.concatenate([up(d), a], -1), p[4])
    return ((e - x) ** 2).mean()


def unet_args():
    return (
        [
            f32(3, 3, 3, 32),
            f32(3, 3, 32, 64),
            f32(3, 3, 64, 128),
            f32(3, 3, 192, 64),
            f32(3, 3, 96, 3),
        ],
        f32(8, 64, 64, 3),
    )


def lstm(p, xs):
    def step(c, x):
        h, c = c
        i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    z = jnp.zeros((xs.shape[1], len(p["u"])))
    return (jax.lax.scan(step, (z, z), xs)[1] ** 2).mean()


def lstm_args():
    return (dict(w=f32(128, 1024), u=f32(256, 1024), b=f32(1024)), f32(64, 32, 128))


def gru(p, xs):
    def step(h, x):
        z, r = jnp.split(jax.nn.sigmoid(x @ p["w"][:, :512] + h @ p["u"][:, :512]), 2, -1)
        n = jnp.tanh(x @ p["w"][:, 512:] + (r * h) @ p["u"][:, 512:])
        return (1 - z) * h + z * n, None

    return (jax.lax.scan(step, jnp.zeros((xs.shape[1], 256)), xs)[0] ** 2).mean()


def gru_args():
    return (dict(w=f32(128, 768), u=f32(256, 768)), f32(64, 32, 128))


def attention_args():
    return [f32(4, 256, 8, 64)] * 3


def attention_loss(q, k, v):
    return (models.attention(q, k, v) ** 2).mean()


def causal_att(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 8
    t = q.shape[1]
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e9)
    return (jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v) ** 2).mean()


def cross_entropy(w, x, y):
    lp = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(lp, y[:, None], 1).mean()


def cross_entropy_one_hot(w, x, y):
    return -(jax.nn.one_hot(y, w.shape[1]) * jax.nn.log_softmax(x @ w)).sum(-1).mean()


def embedding_args():
    return dict(table=f32(8000, 256), up=f32(256, 1024), down=f32(1024, 256)), i32(1024)


def embed_only(t, i):
    return (t[i] ** 2).sum()


def mlp(ws, x):
    for w, b in ws:
        x = jax.nn.relu(x @ w + b)
    return (x**2).mean()


def mlp_args(n=4, m=512, b=256):
    return ([(f32(m, m), f32(m))] * n, f32(b, m))


def mlp_tanh(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def swiglu(p, x):
    def block(x, p):
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x + (jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["d"], None

    return (jax.lax.scan(block, x, p)[0] ** 2).mean()


def swiglu_args():
    return (dict(g=f32(6, 256, 1024), u=f32(6, 256, 1024), d=f32(6, 1024, 256)), f32(1024, 256))


def rk4(y0, w):
    f = lambda y: jnp.tanh(y @ w)

    def step(y, _):
        k1 = f(y)
        k2 = f(y + 0.05 * k1)
        k3 = f(y + 0.05 * k2)
        k4 = f(y + 0.1 * k3)
        return y + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return (jax.lax.scan(step, y0, None, length=50)[0] ** 2).sum()


def sinkhorn(c):
    k = jnp.exp(-c)

    def body(i, uv):
        u, v = uv
        u = 1 / (k @ v)
        return u, 1 / (k.T @ u)

    u, v = jax.lax.fori_loop(0, 50, body, (jnp.ones(len(c)), jnp.ones(len(c))))
    return u[:, None] * k * v


def kmeans(x, c):
    d = ((x[:, None] - c) ** 2).sum(-1)
    a = d.argmin(1)
    s = jax.ops.segment_sum(x, a, len(c))
    n = jax.ops.segment_sum(jnp.ones(len(x)), a, len(c))
    return s / jnp.maximum(n, 1)[:, None]


def heat(u):
    def step(u, _):
        lap = (
            jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1) - 4 * u
        )
        return u + 0.1 * lap, None

    return jax.lax.scan(step, u, None, length=20)[0]


def cond_net(p, x, flag):
    return jax.lax.cond(
        flag, lambda x: jnp.tanh(x @ p["a"]) @ p["b"], lambda x: x @ p["c"], x
    ).sum()


def while_newton(a, x):
    def cond(c):
        return (c[1] > 1e-3) & (c[2] < 100)

    def body(c):
        x, _, i = c
        r = a @ x - x
        y = x - 0.1 * r
        return y, jnp.abs(r).max(), i + 1

    return jax.lax.while_loop(cond, body, (x, jnp.float32(1.0), 0))[0]


def rope_gqa(p, x):
    b, t, m = x.shape

    def rope(x):
        d = x.shape[-1] // 2
        f = 10000.0 ** (-jnp.arange(d) / d)
        a = jnp.arange(t)[:, None] * f
        c, s = jnp.cos(a)[:, None], jnp.sin(a)[:, None]
        x1, x2 = x[..., :d], x[..., d:]
        return jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], -1)

    q = rope((x @ p["q"]).reshape(b, t, 8, -1))
    k = rope((x @ p["k"]).reshape(b, t, 2, -1))
    v = (x @ p["v"]).reshape(b, t, 2, -1)
    q = q.reshape(b, t, 2, 4, -1)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) / 8
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e9)
    o = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s), v).reshape(b, t, m)
    return ((x + o @ p["o"]) ** 2).mean()


def gqa_args():
    return (
        dict(q=f32(512, 512), k=f32(512, 128), v=f32(512, 128), o=f32(512, 512)),
        f32(4, 256, 512),
    )


def gan(p, x, z):
    g, d = p
    fake = jnp.tanh(jax.nn.relu(z @ g[0]) @ g[1])
    D = lambda x: jax.nn.leaky_relu(x @ d[0]) @ d[1]
    return jax.nn.softplus(-D(x)).mean() + jax.nn.softplus(D(fake)).mean()


def vae(p, x, key):
    h = jax.nn.relu(x @ p["e1"])
    m, s = h @ p["m"], h @ p["s"]
    z = m + jnp.exp(0.5 * s) * jax.random.normal(key, m.shape)
    y = jax.nn.relu(z @ p["d1"]) @ p["d2"]
    return ((y - x) ** 2).sum(-1).mean() - 0.5 * (1 + s - m**2 - jnp.exp(s)).sum(-1).mean()


def vae_args():
    return (
        dict(e1=f32(784, 400), m=f32(400, 20), s=f32(400, 20), d1=f32(20, 400), d2=f32(400, 784)),
        f32(512, 784),
        jax.random.key(0),
    )


def state_space(a, b, c, x):
    h = jax.lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.broadcast_to(a, x.shape), x * b)
    )[1]
    return (h * c).sum()


def graph_net(p, x, snd, rcv):
    for w in p:
        m = x[snd] @ w
        x = jax.nn.relu(jax.ops.segment_sum(m, rcv, len(x)))
    return (x**2).mean()


def maml(w, x, y):
    inner = lambda w: ((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2).mean()
    w2 = jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(inner)(w))
    return inner(w2)


def conv1d_net(ws, x):
    for w in ws:
        x = jax.nn.gelu(
            jax.lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            )
        )
    return (x**2).mean()


def mixer(p, x):
    def block(x, p):
        y = models.norm(x).swapaxes(1, 2)
        x = x + (jax.nn.gelu(y @ p["t1"]) @ p["t2"]).swapaxes(1, 2)
        return x + jax.nn.gelu(models.norm(x) @ p["c1"]) @ p["c2"], None

    return (jax.lax.scan(block, x, p)[0] ** 2).mean()


def mixer_args():
    return (
        dict(t1=f32(4, 64, 256), t2=f32(4, 256, 64), c1=f32(4, 256, 1024), c2=f32(4, 1024, 256)),
        f32(16, 64, 256),
    )


def fourier_convolution(k, x):
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * jnp.fft.rfft(k, axis=0), axis=1)


def contrastive(w, a, b):
    n = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    s = n(a @ w) @ n(b @ w).T * 10
    return -jnp.diag(jax.nn.log_softmax(s)).mean()


def int8_product(x, w):
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def equinox_loss(make):
    params, static = eqx.partition(eqx.filter_eval_shape(make), lambda x: hasattr(x, "shape"))

    def loss(params, x):
        return (jax.vmap(eqx.combine(params, static))(x) ** 2).mean()

    return loss, params


def nnx_loss(kind):
    graph, params = nnx.split(nnx.eval_shape(lambda: kind(nnx.Rngs(0))))
    params = jax.tree.map(lambda x: S(x.shape, x.dtype), params)

    def loss(params, x):
        return (nnx.merge(graph, params)(x) ** 2).mean()

    return loss, params


def equinox_mlp():
    make = lambda: eqx.nn.MLP(256, 256, 1024, 3, key=jax.random.key(0))
    return *equinox_loss(make), f32(512, 256)


def equinox_convolutions():
    def make():
        k = jax.random.split(jax.random.key(0), 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 32, 3, padding=1, key=k[0]),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(32, 64, 3, padding=1, key=k[1]),
                eqx.nn.Lambda(jax.nn.relu),
            ]
        )

    return *equinox_loss(make), f32(16, 3, 32, 32)


def nnx_mlp():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(256, 1024, rngs=rngs)
            self.n = nnx.LayerNorm(1024, rngs=rngs)
            self.b = nnx.Linear(1024, 256, rngs=rngs)

        def __call__(self, x):
            return self.b(nnx.gelu(self.n(self.a(x))))

    return *nnx_loss(Model), f32(512, 256)


def nnx_attention():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.c = nnx.Conv(3, 64, (4, 4), strides=4, rngs=rngs)
            self.a = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.b = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            x = self.c(x)
            x = x.reshape(len(x), -1, 64)
            return self.b((x + self.a(x)).mean(1))

    return *nnx_loss(Model), f32(16, 64, 64, 3)
