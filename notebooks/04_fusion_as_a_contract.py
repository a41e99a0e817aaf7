# %% [markdown]
# # Fusion as a contract
#
# Between the matrix products of a network stand norms, gates, softmaxes, dropout, and at the end
# an optimizer: a few operations for each number, which take no time. What takes time is to fetch
# the number from memory and to put the result back. If each of these operations is a program of
# its own, a *kernel*, then each does so; if all of them are one kernel, it is done once.
#
# To *fuse* kernels is therefore what compilers for arrays do first, and they are good at it. But
# how they do it is a guess: a heuristic that looks at shapes, at how many readers a value has, at
# what it cost on the machine of whoever wrote it. Nobody tells you what it has guessed. You change
# a width, save one more value for the backward pass, and a step takes a third longer.
#
# This notebook looks at the guess, by counting kernels and bytes in compiled programs, and then at
# the alternative: to *say* that something is one kernel, and to be told where it can't be.

# %%
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import xform as xf
from xform.jaxpr import trace, walk

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"

# %% [markdown]
# ## Where the bytes go
#
# Here is what opens a block of most language models. It adds what the last block has computed to
# the stream that runs through all of them, and divides each row by its root mean square, which is
# taken in float32. The sum is a result as well: it is the stream.


# %%
def norm(x, stream, weight):
    h = x + stream
    wide = h.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = wide * jax.lax.rsqrt(square + 1e-6)
    return y.astype(x.dtype) * weight[None], h


ROWS, WIDTH = 4096, 4096
of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
x, weight = of(ROWS, WIDTH), of(WIDTH)

size = lambda values: sum(v.aval.size * v.aval.dtype.itemsize for v in values) / 1e6
equations = [site.eqn for site in walk(trace(norm, x, x, weight))]
names = [eqn.primitive.name.replace("convert_element_type", "cast") for eqn in equations]
read = np.array([size(eqn.invars) for eqn in equations])
written = np.array([size(eqn.outvars) for eqn in equations])
whole = jax.make_jaxpr(norm)(x, x, weight).jaxpr
needed = size(whole.invars), size(whole.outvars)

_, ax = plt.subplots(figsize=(7.5, 3.9))
rows = np.arange(len(equations))
ax.barh(rows, read, color=BLUE, label="read")
ax.barh(rows, written, left=read, color=ORANGE, label="written")
ax.barh(len(rows) + 0.5, needed[0], color=BLUE)
ax.barh(len(rows) + 0.5, needed[1], left=needed[0], color=ORANGE)
ax.set_yticks(
    np.append(rows, len(rows) + 0.5), [*names, "arguments, results"], family="monospace", size=8
)
ax.invert_yaxis()
ax.set(xlabel="through memory (MB)", title="4096 rows of 4096, each operation by itself")
ax.legend(frameon=False)
plt.show()

apart, once = read.sum() + written.sum(), sum(needed)
h200 = xf.device("H200")
counted = xf.cost(norm)(x, x, weight)
print(f"one after the other {apart:.0f} MB: on an H200 {apart * 1e12 / h200.bandwidth:.0f} µs")
print(f"what must be moved  {once:.0f} MB: on an H200 {once * 1e12 / h200.bandwidth:.0f} µs")
print(f"all the arithmetic: {float(counted.flops) / h200.peak['float32'] * 1e6:.2f} µs")

# %% [markdown]
# Operation by operation, almost six times as much goes through memory as needs to. Most of that is
# `wide` and what is made of it: float32 copies that nobody asked for, four bytes a number in the
# place of two. The arithmetic takes less than a hundredth of even the shortest time. So all that
# counts is how many of these bars are left.
#
# ## The guess
#
# XLA compiles the whole function, and fuses. `xf.explain` reads the compiled program: what it runs
# as kernels, what each reads and writes, which memory it needs beside arguments and results. First
# for the processor that this notebook runs on:

# %%
small = of(2048, 1024), of(2048, 1024), of(1024)
on_cpu = xf.explain(norm)(*small)
for kernel in on_cpu.program.kernels:
    line = kernel.line.split()[0].split("/")[-1]
    print(f"{line:8} {kernel.read / 1e6:5.1f} MB read {kernel.written / 1e6:5.1f} MB written")
print(f"temporaries: {on_cpu.memory['temporaries'] / 1e6:.1f} MB")

# %% [markdown]
# Five kernels, of the lines on the left, and a temporary of 8.4 MB: the sum in float32, written by
# one kernel for another to read. Now for a GPU. It need not be here: `xf.explain` compiles for it
# all the same, and counts what that has made. We take three functions, and do nothing but make
# their rows longer:


# %%
def layer_norm(x, weight, bias):
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * weight[None] + bias[None]


def softmax(x):
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def gate(x, up):
    return jax.nn.silu(x) * up


SUBJECTS = {  # of rows and width, the types of arguments
    "norm": (norm, lambda n, d: (of(n, d), of(n, d), of(d))),
    "layer norm": (layer_norm, lambda n, d: (of(n, d), of(d), of(d))),
    "softmax": (softmax, lambda n, d: (of(n, d),)),
    "gate": (gate, lambda n, d: (of(n, d), of(n, d))),
}


def least(f, args):
    """MB of arguments and results."""
    arrays = jax.tree.leaves((args, jax.eval_shape(f, *args)))
    return sum(a.size * a.dtype.itemsize for a in arrays) / 1e6


def on_h200(f, *args):
    """Kernels of a program that is compiled for an H200, and the MB that they move."""
    kernels = xf.explain(f, target="H200")(*args).program.kernels
    return len(kernels), sum(kernel.bytes * kernel.trips for kernel in kernels) / 1e6


widths = [1024, 4096, 16_384, 32_768, 65_536]
guessed = {
    name: [on_h200(f, *types(ROWS, d)) for d in widths]
    for name, (f, types) in list(SUBJECTS.items())[:3]
}

_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
for (name, found), colour, mark in zip(guessed.items(), (BLUE, ORANGE, GREEN), "os^", strict=True):
    f, types = SUBJECTS[name]
    moved = [mb / least(f, types(ROWS, d)) for (_, mb), d in zip(found, widths, strict=True)]
    left.semilogx(widths, [k for k, _ in found], mark + "-", color=colour, label=name, base=2)
    right.semilogx(widths, moved, mark + "-", color=colour, label=name, base=2)
left.set(ylabel="kernels (count)", ylim=(0, 8), title="what XLA makes of it for an H200")
right.set(ylabel="moved, relative to the least", ylim=(0, 2.5), title="and what that moves")
right.axhline(1, color=GREY, linestyle=":")
for ax in (left, right):
    ax.set(xlabel="width of a row (numbers)")
    ax.set_xticks(widths, [f"{d // 1024}k" for d in widths])
left.legend(frameon=False)
plt.show()

# %% [markdown]
# For a layer norm and for a softmax the guess is perfect: one kernel, every byte once. Until it is
# not. Somewhere between two widths they fall into several kernels, and twice the bytes. Nothing
# else has changed, nothing was said. And our norm with its second result has never been one
# kernel: the sum `h` is made by one and read again by another.
#
# None of this is a fault of the compiler. It promised nothing.
#
# ## The contract
#
# `xf.fuse` promises: what is inside is **one kernel forward and one backward, or an error**, before
# anything has run. It is an operation of the program, and can be seen there. Here are the equations
# of our norm and its gradient:


# %%
def with_gradients(f):
    """Results of a function, and its gradients along given cotangents."""

    def run(args, cts):
        outs, pull = jax.vjp(f, *args)
        return outs, pull(cts)

    return run


def arguments(name, n, d):
    f, types = SUBJECTS[name]
    args = types(n, d)
    return args, jax.eval_shape(f, *args)


fused = {name: xf.fuse(f) for name, (f, _) in SUBJECTS.items()}
for eqn in jax.make_jaxpr(with_gradients(fused["norm"]))(*arguments("norm", ROWS, WIDTH)).eqns:
    short = lambda values: ", ".join(v.aval.str_short(short_dtypes=True) for v in values)
    print(f"{eqn.primitive}\n    reads  {short(eqn.invars)}\n    writes {short(eqn.outvars)}")

# %% [markdown]
# Two operations. The first writes what it was asked for and, for the second, one number of each
# row: the mean square, from which all else follows. `wide`, `y` and their like are made again in
# the backward kernel, since making them is free and keeping them is not.
#
# What rows are was not said either. It follows from the program: a dim that something reads
# *across*, as the mean does, lies within a row, and all other dims are rows, which have nothing to
# do with each other. A kernel walks over blocks of them. What sums over rows, such as the gradient
# of `weight`, can't be finished by any block; each has a sum of its own, and one reduction adds
# these up in the end. That is the only thing which may come after the kernel.
#
# On a CPU the kernel is a loop over blocks that are small enough for a cache, and nothing in it is
# larger than a block. That can be read off the compiled program, and `fuse` does read it before it
# lets you run it:

# %%
print(f"{'with gradients':18} {'kernels':>7} {'temporaries':>14}")
for name in SUBJECTS:
    args = arguments(name, 2048, 1024)
    for how, f in (("XLA", SUBJECTS[name][0]), ("fuse", fused[name])):
        report = xf.explain(with_gradients(f))(*args)
        loops = len(report.program.loops)
        count = f"{loops} loops" if loops else len(report.program.kernels)
        kilobytes = report.memory["temporaries"] / 1e3
        print(f"{name:13} {how:4} {count:>7} {kilobytes:11,.0f} kB")

# %% [markdown]
# Two loops each, one forward and one backward, and temporaries of some blocks, however many rows
# there are (of the gate, also an array of zeros, as which its three results begin). For the H200,
# the same functions with their gradients, in bytes. On the left is what each moves. On the right
# the same numbers are points under a roof: the operations are the same, so a program with fewer
# bytes stands further to the right, and under the slope whoever is further to the right is faster
# by as much.

# %%
moved, work = {}, {}
for name in SUBJECTS:
    args = arguments(name, ROWS, WIDTH)
    counted = xf.cost(with_gradients(SUBJECTS[name][0]))(*args)
    work[name] = float(counted.flops)
    compiled = [on_h200(with_gradients(f), *args)[1] for f in (SUBJECTS[name][0], fused[name])]
    moved[name] = [float(counted.bytes) / 1e6, *compiled]

_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1.1, 1))
for i, (how, colour) in enumerate(
    zip(("each operation by itself", "XLA", "fuse"), (GREY, ORANGE, BLUE), strict=True)
):
    megabytes = np.array([moved[name][i] for name in SUBJECTS])
    bars = left.barh(np.arange(len(SUBJECTS)) + 0.27 * (i - 1), megabytes, 0.25, color=colour)
    left.bar_label(bars, fmt="%.0f", size=8, padding=2)
    operations = np.array([work[name] for name in SUBJECTS])
    intensity = operations / (megabytes * 1e6)
    right.loglog(intensity, h200.bandwidth * intensity / 1e12, "o", color=colour, label=how)
left.set_yticks(range(len(SUBJECTS)), SUBJECTS)
left.invert_yaxis()
left.set(xlabel="through memory (MB)", title="4096 × 4096, forward and backward")
left.set_xlim(0, 1.12 * max(map(max, moved.values())))
span = np.geomspace(0.05, 1000, 100)
roof = np.minimum(h200.peak["float32"], h200.bandwidth * span) / 1e12
right.loglog(span, roof, color="0.4", linewidth=1, zorder=0)
right.set(xlabel="operations per byte", ylabel="at most (10¹² operations/s)")
right.set_title("under the roof of an H200", size=10)
right.legend(frameon=False)
plt.show()

# %% [markdown]
# All of it is at the lower end of the slope, two decades from where arithmetic begins to count. A
# fused kernel is not fast because it computes well. It is fast because there is nothing left to
# move. Only of the gate XLA moves less: both passes stand side by side here, and it has made one
# kernel of them. In a training step the loss stands in between, which no fusion can pass; then
# there are two, and they move what `fuse` moves.
#
# ## It says no
#
# A contract that is never refused is not one. Let us ask for too much, a whole block with its
# product inside:

# %%
BATCH, D, HIDDEN = 64, 128, 256
draw = iter(jax.random.split(jax.random.key(0), 9))
normal = lambda *shape: jax.random.normal(next(draw), shape, jnp.bfloat16)
h, w, scale, up = normal(BATCH, D), normal(D, HIDDEN), normal(D), normal(BATCH, HIDDEN)


def block(h, w, scale, up):
    n, _ = norm(h, h, scale)
    hidden = n @ w
    return jax.nn.silu(hidden) * up


try:
    xf.fuse(block)(h, w, scale, up)
except xf.FusionError as refused:
    print(refused)

# %% [markdown]
# The operation, its line, the reason, and the nearest split that would be legal. A product reads
# each row once for every column of the other factor; that is another kind of kernel, and it is not
# this one's to make. (A device has limits, too: rows of more than 8192 numbers don't fit into the
# registers of a GPU together with the sums of a weight's gradient, so this kernel's backward pass
# would be refused there, with that reason.) So do as it says: one kernel before, one after.


# %%
def split(h, w, scale, up):
    n, _ = fused["norm"](h, h, scale)
    return fused["gate"](n @ w, up)


same = jnp.array_equal(jax.jit(split)(h, w, scale, up), block(h, w, scale, up))
print([eqn.primitive.name for eqn in jax.make_jaxpr(split)(h, w, scale, up).eqns])
print("the same numbers, bit by bit:", bool(same))

# %% [markdown]
# Some refusals are worth a thought. The loss of a classifier picks one number out of each row by
# an index, and a *gather* may read from anywhere; so it is refused. But "where the column is the
# label" is a comparison, element by element, and means the same:

# %%
logits = normal(BATCH, 1000).astype(jnp.float32)
labels = jnp.arange(BATCH, dtype=jnp.int32) * 7


def picked(logits, labels):
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def compared(logits, labels):
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    own = jnp.sum(jnp.where(columns == labels[:, None], logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - own


try:
    xf.fuse(picked)(logits, labels)
except xf.FusionError as refused:
    print(refused)
found, wanted = xf.fuse(compared)(logits, labels), picked(logits, labels)
print("\nfused, it is the same to a millionth:", bool(jnp.abs(found - wanted).max() < 1e-6))

# %% [markdown]
# ## One value, one rounding
#
# There is a second reason to want a say in fusion, and it is about numbers. Softmax subtracts the
# largest score of a row before it takes exponentials, so that none exceeds 1. The scores are in
# bfloat16, and two things read them: the maximum, and the difference.


# %% tags=["measured"]
def weights(x, scale):
    scores = x * scale
    top = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.exp(scores.astype(jnp.float32) - top.astype(jnp.float32))


x = jax.random.uniform(jax.random.key(1), (1000, 256), jnp.bfloat16, -1, 1)
scales = 10.0 ** np.linspace(0, 4.5, 55)
largest = lambda f: np.array([float(f(x, jnp.bfloat16(s)).max()) for s in scales])
guess, contract = largest(jax.jit(weights)), largest(jax.jit(xf.fuse(weights)))

_, ax = plt.subplots(figsize=(7.5, 3.5))
ax.loglog(scales, guess, "o-", color=RED, markersize=4, linewidth=0.8, label="jax.jit")
ax.loglog(scales, contract, "-", color=BLUE, linewidth=2.5, label="jax.jit(xf.fuse)")
ax.set(xlabel="size of the scores (nats)", ylabel="largest weight (should be 1)")
ax.set_ylim(1e-6, 1e30)
ax.legend(frameon=False, loc="upper left")
plt.show()
print("fused, the largest weight is always 1:", bool((contract == 1).all()))

# %% [markdown]
# This is one function, compiled as one program, and weights that are at most 1 are larger, by any
# number of orders of magnitude. XLA has put `x * scale` into two kernels. The one that takes the
# maximum rounds it to bfloat16; the one that subtracts goes on with float32, where nothing needs to
# be rounded, since the rounded number would be widened at once. Each is right by itself. Together
# they subtract the maximum of other scores than those they have.
#
# A kernel that computes a value once, for all that read it, can't do that: there is one value, and
# it has one rounding, where the program says so. (*When numbers break* has the same hazard across
# two programs, and the cure for it.)
#
# ## An optimizer
#
# The last thing that a step does is to read all there is: parameters, gradients, two moments, and
# to write all but one back. AdamW is some fifteen operations a number. By hand it is a page of
# CUDA, and several libraries have one. Here it is as one would write it down:


# %%
@xf.fuse
def adamw(p, g, m, v, step):
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    size = jnp.sqrt(v / (1 - 0.95**step)) + 1e-8
    p = p - 1e-3 * (m / (1 - 0.9**step) / size + 0.1 * p)
    return p, m, v, p.astype(jnp.bfloat16)  # what the next step multiplies


params: Any = {"gate": normal(D, HIDDEN), "down": normal(HIDDEN, D), "scale": normal(D)}
params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
reference = optax.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)
state, mine = reference.init(params), {k: (p, 0 * p, 0 * p, None) for k, p in params.items()}
for step in range(1, 6):
    gradients = jax.tree.map(lambda p, t=step: jnp.sin(t + 100 * p), params)
    updates, state = reference.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    for name, (p, m, v, _) in mine.items():
        mine[name] = adamw(p, gradients[name], m, v, jnp.float32(step))
off = max(float(jnp.abs(params[k] - mine[k][0]).max()) for k in params)
print("after 5 steps it differs from optax by more than a millionth:", off > 1e-6)

# %%
million = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
step = jax.ShapeDtypeStruct((), jnp.float32)
args = (million, million, million, million, step)
kernels, megabytes = on_h200(adamw, *args)
print(f"an H200 runs {kernels} kernel, which moves {megabytes:.1f} bytes for each parameter")
print(f"each operation by itself: {float(xf.cost(adamw)(*args).bytes) / 1e6:.0f} bytes")

# %% [markdown]
# Sixteen bytes in and fourteen out, and that is all that there can be. A copy in bfloat16 for the
# next step costs the two bytes that it has, and no kernel of its own. Over a model's parameters it
# is called leaf by leaf: matrices of different shapes have no rows in common, and a function of
# all of them is refused with that reason.
#
# ## And time?
#
# A contract about bytes is not one about seconds. On this processor, where a cache holds much of
# what goes back and forth between two kernels, it depends:


# %% tags=["measured"]
def seconds(f, *args, runs=9):
    """The shortest of some runs: what the machine can do when nothing disturbs it."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        taken.append(time.perf_counter() - start)
    return min(taken)


fill = lambda tree: jax.tree.map(lambda t: jax.random.normal(next(keys), t.shape, t.dtype), tree)
keys = iter(jax.random.split(jax.random.key(2), 99))
times = {}
for name in SUBJECTS:
    args, cts = map(fill, arguments(name, 2048, 1024))
    both = [seconds(with_gradients(f), args, cts) for f in (SUBJECTS[name][0], fused[name])]
    times[name] = np.array(both) * 1e3

_, ax = plt.subplots(figsize=(7, 2.9))
for i, (how, colour) in enumerate((("XLA", ORANGE), ("fuse", BLUE))):
    bars = ax.barh(
        np.arange(len(times)) + 0.36 * (i - 0.5), [t[i] for t in times.values()], 0.34,
        color=colour, label=how,
    )  # fmt: skip
    ax.bar_label(bars, fmt="%.0f", size=8, padding=2)
ax.set_yticks(range(len(times)), times)
ax.invert_yaxis()
ax.set(xlabel="time (ms)", title="2048 × 1024, forward and backward, this processor")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Where XLA goes through memory often, as in layer norm, it takes half the time, and in the other
# norm as much; where XLA has fused all there is, as in softmax and the gate, a loop over blocks on
# one core takes two to four times as long. So measure, and say it where it matters: what you
# have not said is the compiler's to guess.
#
# ## What to take home
#
# * Between products, bytes are what counts. Add up what each operation reads and writes, and what
#   arguments and results are; the quotient is what fusion can be worth.
# * Count the kernels of the compiled program: `xf.explain(f)(*args)`, or with `target="H200"` for
#   a GPU that is not there. Count again when a width has changed.
# * `xf.fuse` makes one kernel forward and one backward, of what is elementwise and what sums or
#   compares along rows, or says which line stands in the way and where to cut.
# * In 16 bits, a value that is computed twice may be two values. In one kernel it is one.
# * It composes: `vmap` adds rows, `shard_map` gives each device its own, derivatives of every
#   order are kernels; `xf.fuse_rule` lets in a primitive of your own.
