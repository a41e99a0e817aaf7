import jax, jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal


def empty(shape, dtype):
    return lax.empty(shape, dtype)


def layers(step, x, stack, policy):
    L = jax.tree.leaves(stack)[0].shape[0]
    types = lambda t: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), t)
    p0 = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
    trees = {}
    ck = jax.checkpoint(step, policy=policy, prevent_cse=False)

    def forward(x, p):
        y, back = jax.vjp(ck, x, p)
        res, trees["back"] = jax.tree.flatten(back)
        return y, res

    fwd, out = jax.make_jaxpr(forward, return_shape=True)(types(x), p0)
    x_leaves, x_tree = jax.tree.flatten(x)
    jaxpr = fwd.jaxpr
    consts = fwd.consts
    nx = len(x_leaves)
    ny = len(jax.tree.leaves(out[0]))
    outs, res = jaxpr.outvars[:ny], jaxpr.outvars[ny:]
    pvars = jaxpr.invars[nx:]
    kept = [
        v
        for v in dict.fromkeys(v for v in res if not isinstance(v, Literal))
        if v not in pvars and v not in jaxpr.constvars
    ]
    print(
        "kept",
        [(v.aval.str_short()) for v in kept],
        "const",
        [v.aval.str_short() for v in jaxpr.constvars],
        "lit",
        sum(isinstance(v, Literal) for v in res),
    )
    at = lambda a, i: lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
    put = lambda a, v, i: lax.dynamic_update_index_in_dim(a, v, i, 0)

    def run(xs, ps, stacks, i):
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, [*xs, *ps]))
        stacks = dict(zip(kept, stacks))

        def keep(v):
            if v in stacks:
                stacks[v] = lax.optimization_barrier(put(stacks[v], env[v], i))
                env[v] = at(stacks[v], i)

        for v in jaxpr.invars:
            keep(v)
        read = lambda a: a.val if isinstance(a, Literal) else env[a]
        for e in jaxpr.eqns:
            vals = [read(a) for a in e.invars]
            params = e.params
            r = e.primitive.bind(*vals, **params)
            for v, val in zip(e.outvars, r if e.primitive.multiple_results else [r]):
                env[v] = val
                keep(v)
        return [read(v) for v in outs], [stacks[v] for v in kept]

    @jax.custom_vjp
    def go(x, stack, *consts):
        return lax.scan(lambda x, p: (step(x, p), None), x, stack)[0]

    def go_fwd(x, stack, *cs):
        stacks = [empty((L, *v.aval.shape), v.aval.dtype) for v in kept]
        leaves = jax.tree.leaves(stack)

        def body(c):
            i, xs, stacks = c
            ps = [at(a, i) for a in leaves]
            xs, stacks = run(xs, ps, stacks, i)
            return i + 1, xs, stacks

        _, xs, stacks = lax.while_loop(
            lambda c: c[0] < L, body, (jnp.int32(0), jax.tree.leaves(x), stacks)
        )
        return jax.tree.unflatten(x_tree, xs), (stacks, leaves)

    def go_bwd(saved, dy):
        stacks, leaves = saved
        grads = [empty(a.shape, a.dtype) for a in leaves]

        def body(c):
            j, dxs, grads = c
            i = L - 1 - j
            env = (
                dict(zip(jaxpr.constvars, consts))
                | dict(zip(kept, [at(s, i) for s in stacks]))
                | dict(zip(pvars, [at(a, i) for a in leaves]))
            )
            r = [a.val if isinstance(a, Literal) else env[a] for a in res]
            back = jax.tree.unflatten(trees["back"], r)
            dx, dp = back(jax.tree.unflatten(x_tree, dxs))
            grads = [put(g, d, i) for g, d in zip(grads, jax.tree.leaves(dp))]
            return j + 1, jax.tree.leaves(dx), grads

        _, dxs, grads = lax.while_loop(
            lambda c: c[0] < L, body, (jnp.int32(0), jax.tree.leaves(dy), grads)
        )
        return (
            jax.tree.unflatten(x_tree, dxs),
            jax.tree.unflatten(jax.tree.structure(stack), grads),
            *[None for _ in consts],
        )

    go.defvjp(go_fwd, go_bwd)
    return go(x, stack, *consts)
