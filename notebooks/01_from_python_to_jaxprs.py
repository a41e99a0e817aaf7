# %% [markdown]
# # From Python to jaxprs
#
# `jit`, `grad` and `vmap` look like magic: they take a Python function and give back another one
# that is compiled, differentiated, batched. None of them reads your source code. They run your
# function once, on values that are no numbers, and keep a list of what was done to them. That
# list is a *jaxpr*, a program in a language so small that one page of Python can run it. Whoever
# can read and rewrite it can write transforms of their own.
#
# We shall trace a function, run its jaxpr by hand, find what hides inside of loops, and then
# write two transforms: one that **proves** where a function has its minimum, and one that trains
# a network on 3-bit products. Each takes about twenty lines.

# %%
from itertools import pairwise

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from xform.jaxpr import carried, eqn_rule, interpret, rewrite, trace, walk

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})

# %% [markdown]
# ## Running a function on nothing
#
# Here is a function with a Python loop, a Python `if`, and a `print`. We call it once on a
# number, then trace it.


# %%
def horner(x, coefficients=(1.0, 0.0, -0.5)):
    """1 - x²/2, from the highest power down."""
    print("x is", type(x).__name__)
    y = 0.0
    for c in reversed(coefficients):
        y = y * x
        if c:
            y = y + c
    return y


print("value:", horner(0.1))
trace(horner, 0.1)

# %% [markdown]
# Traced, the function ran too: it printed. But `x` was a *tracer*, which knows its shape and
# dtype (`f32[]`) and no value. Each operation on it left an **equation**: `name:type = primitive
# operands`. The Python around them is gone. The loop was run, so that its three turns lie one
# after the other; the `if` was decided, because `c` is a Python number; `y * x` with `y = 0.0` was
# written down although it is zero: a trace is what the program says, and nobody has simplified
# it.
#
# What can't be traced is a decision on a value that isn't there yet, and JAX says so:

# %%
try:
    trace(lambda x: x if x > 0 else -x, 0.1)
except jax.errors.TracerBoolConversionError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## The whole language
#
# A jaxpr has inputs, equations, and outputs; an equation has a primitive, parameters, operands
# and results. There are no expressions, no scopes, no mutation. So this is an interpreter of the
# language:


# %%
def run(jaxpr, *args):
    values = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if hasattr(atom, "val") else values[atom]  # a literal, or a name
    for eqn in jaxpr.eqns:
        out = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
        values.update(
            zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
        )
    return [read(atom) for atom in jaxpr.outvars]


def logsumexp(x):
    top = jnp.max(x)
    return top + jnp.log(jnp.sum(jnp.exp(x - top)))


x = jnp.array([1.0, 2.0, 3.0])
program = trace(logsumexp, x)
print(program)
print("\nby hand:", run(program, x), "  by JAX:", logsumexp(x))

# %% [markdown]
# That dictionary, `values`, is the only state, and so a jaxpr is a graph: values are boxes, and
# arrows lead from each operand to what was made of it.


# %%
def draw(jaxpr, ax):
    """Values as boxes, an arrow from each operand to what is made of it."""
    made = {v: (0.0, 0.0, f"x\n{v.aval.str_short()}") for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        depth = 1 + max((made[v][0] for v in eqn.invars if v in made), default=0)
        shift = 0.9 if eqn.primitive.name in ("reduce_max", "stop_gradient") else 0.0
        for v in eqn.outvars:
            made[v] = (depth, shift, f"{eqn.primitive.name}\n{v.aval.str_short()}")
            for operand in (u for u in eqn.invars if u in made):
                (x0, y0, _), (x1, y1, _) = made[operand], made[v]
                bend = (
                    0.0 if x1 - x0 == 1 else 0.3 if y0 == y1 else -0.25
                )  # around what lies between
                style = dict(arrowstyle="-|>", color="0.5", shrinkA=24, shrinkB=26)
                ax.annotate(
                    "",
                    (x1, y1),
                    (x0, y0),
                    arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"},
                )
    for depth, height, label in made.values():
        box = dict(boxstyle="round,pad=0.35", facecolor="#e4eef4", edgecolor="#2d6a8e")
        ax.text(depth, height, label, ha="center", va="center", size=8, bbox=box)
    ax.set(xlim=(-0.6, max(d for d, *_ in made.values()) + 0.6), ylim=(-0.8, 1.5))
    ax.set_axis_off()


_, ax = plt.subplots(figsize=(10, 2.6))
draw(program, ax)
ax.set_title("logsumexp: arrows are data, boxes the equations that made it", size=10)
plt.show()


# %% [markdown]
# ## Programs within programs
#
# Our interpreter called `bind`, which hands an equation to JAX. That hides a question: what of a
# loop that JAX knows about? `jax.lax.scan` doesn't unroll. It is *one* equation, with a jaxpr of
# its own among its parameters. Here is a two-layer network under `scan`, `jit` and a branch.


# %%
def network(weights, x):
    def layer(h, w):
        h = jax.lax.cond(jnp.sum(h) > 0, jnp.tanh, jax.nn.relu, h @ w)
        return h / jnp.sqrt(jnp.mean(h**2) + 1e-6), jnp.max(h)

    h, peaks = jax.lax.scan(layer, x, weights)
    return jnp.sum(jax.jit(jnp.sin)(h)) + jnp.sum(peaks)


weights = jax.random.normal(jax.random.key(0), (6, 16, 16)) / 4
x = jax.random.normal(jax.random.key(1), (16,))
program = trace(network, weights, x)
print([eqn.primitive.name for eqn in program.eqns])

# %% [markdown]
# Five names, and no matrix product among them. Anybody who counts operations by looping over
# `jaxpr.eqns` counts wrong. `xform.jaxpr.walk` visits every equation at every depth (bodies of
# scans, branches of conds, what `jit`, `remat`, custom derivatives and kernels hold) and says
# where each one stands and which line of yours made it:

# %%
for site in walk(program):
    print(f"{'    ' * site.depth}{site.eqn.primitive.name:<{30 - 4 * site.depth}}{site.line}")

# %% [markdown]
# The line is what makes a report useful. Inside a notebook it is the number of the cell and the
# line in it; elsewhere, file and line. So a question about a program, such as "which lines
# multiply matrices?", is a comprehension:

# %%
sorted({site.line for site in walk(program) if site.eqn.primitive.name == "dot_general"})

# %% [markdown]
# ## A transform of your own: proofs instead of samples
#
# `run` worked on arrays because `bind` does. Change the values, and the same ten lines do
# something else. `interpret(f, rules)` is that loop with an open table: for each primitive, a
# function of *your* values. Take intervals: the value of `x` is "somewhere in [lo, hi]", and each
# rule returns an interval that surely holds the result.


# %%
def product(a, b, **_):
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def power(a, *, y, **_):
    ends = [a[0] ** y, a[1] ** y]
    return (0.0 if y % 2 == 0 and a[0] <= 0 <= a[1] else min(ends)), max(ends)


def sine(a, **_):
    peak = lambda at: np.floor((a[1] - at) / (2 * np.pi)) >= np.ceil((a[0] - at) / (2 * np.pi))
    ends = np.sin(a[0]), np.sin(a[1])
    return (-1.0 if peak(-np.pi / 2) else min(ends)), (1.0 if peak(np.pi / 2) else max(ends))


intervals = {
    "add": lambda a, b, **_: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b, **_: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a, **_: (-a[1], -a[0]),
    "mul": product,
    "integer_pow": power,
    "square": lambda a, **_: power(a, y=2),
    "exp": lambda a, **_: (np.exp(a[0]), np.exp(a[1])),
    "sin": sine,
}


def point(number):
    """The interval of a literal in the program."""
    return float(number), float(number)


def bounds(f, lo, hi):
    """An interval that holds f(x) for every x in [lo, hi]."""
    (out,) = interpret(trace(f, 0.0), intervals, lift=point)((lo, hi))
    return out


def f(x):
    return jnp.sin(3 * x) + 0.1 * (x - 1) ** 2 - jnp.exp(-((2 * x - 1) ** 2))


low, high = bounds(f, 0.0, 0.1)
print(f"f of everything between 0 and 0.1 lies in [{low:.3f}, {high:.3f}]")
print(f"at the two ends it is {f(0.0):.3f} and {f(0.1):.3f}")

# %% [markdown]
# The first line is true of *all* numbers between 0 and 0.1, of which there are a lot, and it was
# found without trying one of them. Wide intervals give loose bounds, narrow ones tight bounds.
# Cut the range into pieces and every piece gets a box that the curve can't leave:

# %%
_, panels = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
grid = np.linspace(-3, 4, 500)
for ax, pieces in zip(panels, (7, 28, 112), strict=True):
    edges = np.linspace(-3, 4, pieces + 1)
    for lo, hi in pairwise(edges):
        low, high = bounds(f, lo, hi)
        ax.fill_between([lo, hi], low, high, color="#f2a65a", alpha=0.55, linewidth=0)
    ax.plot(grid, f(grid), color="#2d6a8e", linewidth=1.5)
    ax.set(title=f"{pieces} pieces", xlabel="x (no unit)", ylim=(-4, 5))
panels[0].set_ylabel("f(x) (no unit)")
plt.show()

# %% [markdown]
# Now a search that is a proof. Keep the pieces that could hold the minimum, halve them, drop each
# one whose lower bound lies above an upper bound of another. Gradient descent ends in a valley;
# this ends with *the* valley, because what was dropped can't hold the minimum.

# %%
pieces, kept, best = [(-3.0, 4.0)], [], np.inf
for _ in range(18):
    halves = [p for lo, hi in pieces for p in ((lo, (lo + hi) / 2), ((lo + hi) / 2, hi))]
    found = [(bounds(f, *p), p) for p in halves]
    best = min(high for (_, high), _ in found)
    pieces = [p for (low, _), p in found if low <= best]
    kept.append(pieces)

low = min(bounds(f, *p)[0] for p in pieces)
print(f"the minimum over [-3, 4] lies in [{low:.5f}, {best:.5f}]")
print(f"at an x in [{pieces[0][0]:.4f}, {pieces[-1][1]:.4f}]; {len(pieces)} pieces are left")
print(f"a grid of 500 points says {f(grid).min():.5f} at {grid[f(grid).argmin()]:.4f}")

# %%
_, ax = plt.subplots(figsize=(8, 3.4))
for level, found in enumerate(kept[:12], 1):
    for lo, hi in found:
        ax.plot([lo, hi], [level, level], color="#2d6a8e", linewidth=4, solid_capstyle="butt")
ax.set(
    xlabel="x (no unit)", ylabel="halvings (count)", xlim=(-3, 4), title="What may hold the minimum"
)
ax.set_yticks(range(1, 13))
ax.invert_yaxis()
plt.show()


# %% [markdown]
# And if the function uses something that the table has no rule for? Then there is no bound, and
# `interpret` refuses, with the line and a template of what is missing. A default that let it
# through would have made the proof worthless.

# %%
try:
    bounds(lambda x: jnp.tanh(x) * x, 0.0, 1.0)
except NotImplementedError as error:
    print(error)

# %% [markdown]
# Loops need a meaning too, and that's for you to say. On intervals, a scan may well be run turn
# by turn; `carried` tells which of its operands stay, and which go round. With this one rule,
# bounds go through Newton's iteration for a square root.


# %%
def quotient(a, b, **_):
    return product(a, (1 / b[1], 1 / b[0])) if b[0] > 0 else (-np.inf, np.inf)


def scan(eqn, *operands):
    (n, m), turn = carried(eqn), interpret(eqn.params["jaxpr"], loops, lift=point)
    consts, carry = operands[:n], operands[n : n + m]
    for _ in range(eqn.params["length"]):
        carry = turn(*consts, *carry)
    return list(carry)


loops = {**intervals, "div": quotient, "scan": eqn_rule(scan)}


def newton(x, steps=4):
    better = lambda y, _: (0.5 * (y + x / y), None)
    return jax.lax.scan(better, x, length=steps)[0]


(root,) = interpret(trace(newton, 2.0), loops, lift=point)((2.0, 2.01))
print(f"the root of everything in [2, 2.01] lies in [{root[0]:.3f}, {root[1]:.3f}]")
print(f"that of 2, by Newton, is {newton(2.0):.5f}")

# %% [markdown]
# The bounds hold, and they are loose: an interval forgets that both `y`s in `y + x / y` are the
# same number. That is a property of interval arithmetic, and the reason why people invented
# affine and Taylor models, which are other tables for the same walker.
#
# ## A transform that gives a program back
#
# An interpreter ends with values. `rewrite` ends with a function, and what comes out is a JAX
# function like any other, to be differentiated, compiled, scanned over. The question for it: how
# many bits do the products of a network need while it trains? One rule rounds what goes into each
# matrix product, wherever one is, in a `scan` or out of it.


# %%
def rounded(bits):
    """The rules under which products see `bits` bits of each number's mantissa."""
    cut = lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)

    def product(x, y, **params):
        return jax.lax.dot_general_p.bind(cut(x), cut(y), **params)

    return {"dot_general": product}


def predict(params, points):
    h = jnp.tanh(points @ params["first"])
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params["layers"])
    return jnp.squeeze(h @ params["last"], -1)


def loss(params, points, labels):
    return jnp.mean(jnp.log1p(jnp.exp(-labels * predict(params, points))))


turn = jnp.linspace(0.5, 3.0, 200)[:, None]
arm = jnp.concatenate([turn * jnp.cos(3.6 * turn), turn * jnp.sin(3.6 * turn)], 1) / 3
points, labels = jnp.concatenate([arm, -arm]), jnp.repeat(jnp.array([1.0, -1.0]), 200)
keys = jax.random.split(jax.random.key(2), 3)
params = {
    "first": jax.random.normal(keys[0], (2, 32)) * 2,
    "layers": jax.random.normal(keys[1], (4, 32, 32)) / 8,
    "last": jax.random.normal(keys[2], (32, 1)) / 6,
}
before = [eqn.primitive.name for eqn in trace(loss, params, points, labels).eqns]
after = [
    eqn.primitive.name for eqn in trace(rewrite(loss, rounded(3)), params, points, labels).eqns
]
print("as written: ", *before[:5], "…\nrewritten:  ", *after[:9], "…")

# %% [markdown]
# The scan stayed a scan: its body was rewritten, and nothing was unrolled. Two spirals are to be
# told apart; note where `rewrite` stands. `jax.grad(rewrite(loss))` would round the forward pass
# and differentiate that. `rewrite(jax.grad(loss))` rounds every product of the gradient's
# program, the backward ones too. Transforms are functions, and the order in which they are
# applied is a choice that you can see.


# %%
@jax.jit
def step(state, bits):
    branches = [rewrite(jax.value_and_grad(loss), rounded(n)) for n in BITS]
    params, momentum = state
    value, grads = jax.lax.switch(bits, branches, params, points, labels)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum)
    return (params, momentum), value


BITS = (23, 7, 3, 0)
start = (params, jax.tree.map(jnp.zeros_like, params))
train = jax.jit(lambda bits: jax.lax.scan(lambda s, _: step(s, bits), start, length=1000))
runs = {n: train(i) for i, n in enumerate(BITS)}

_, (ax, plane) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1.5, 1))
names = {
    23: "23 bits: float32",
    7: "7 bits: bfloat16",
    3: "3 bits: float8_e4m3",
    0: "none: powers of two",
}
for n, (_, losses) in runs.items():
    ax.plot(losses, label=names[n])
ax.set(
    yscale="log",
    xlabel="step (count)",
    ylabel="loss (nats)",
    title="The same network, its products rounded",
)
ax.legend(frameon=False)
at = jnp.stack(jnp.meshgrid(jnp.linspace(-1.1, 1.1, 120), jnp.linspace(-1.1, 1.1, 120)), -1)
(trained, _), _ = runs[3]
score = predict(trained, at.reshape(-1, 2)).reshape(120, 120)
plane.contourf(at[..., 0], at[..., 1], score, levels=[-1e9, 0, 1e9], colors=["#f6d3ae", "#bcd5e2"])
plane.scatter(*points.T, c=labels, s=5, cmap="PuOr")
plane.set(title="learned with 3 bits", xlabel="x (no unit)", ylabel="y (no unit)", aspect="equal")
plt.show()

# %% [markdown]
# Three bits are enough for two spirals: the curve is rougher than that of float32 and ends where
# it ends. With none, products see powers of two alone, and after two hundred steps the loss hardly
# falls any more. To ask the question of another network is to call `rewrite` on it.
#
# ## What to take home
#
# * A traced function is a list of equations; a transform is a walk over it with a table of rules.
# * Loops, branches and calls are equations that hold programs. A walk that doesn't enter them is
#   wrong.
# * `walk` is for questions, `interpret` for other values, `rewrite` for other programs. What a
#   table doesn't know, none of them makes up.
#
# `xform.cost` is the first with a table of FLOPs, `xform.memory` with one of bytes; attention
# finds the tiles that a mask leaves by the second, with a table of intervals. That one is the
# subject of *Attention as a program*.
