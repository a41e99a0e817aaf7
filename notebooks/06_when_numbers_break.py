# %% [markdown]
# # When numbers break
#
# A program of floating-point numbers is right up to rounding, and rounding is small. Everybody
# knows the exceptions: a difference of two large numbers, an overflow, a division by what happens
# to be zero. What is hard is not to understand them but to *find* them, in a program of ten
# thousand equations, inside of loops, after a compiler has rearranged it, on step 41 of one example
# of a batch.
#
# This notebook breaks numbers in five ways and finds each by name: a softmax whose weights are
# larger than 1; a NaN in the 35th turn of a loop; digits that were lost ten lines before they were
# missed; hazards that need not run to be seen; and arithmetic in 16, 8 and 4 bits, where all of
# this happens sooner.

# %%
import re
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.core.getipython import get_ipython
from matplotlib.colors import LogNorm

from xform import FORMATS, LossScale, numerics, precision, quantise

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"

# %% [markdown]
# ## A weight larger than 1
#
# Softmax subtracts the largest score before it takes exponentials, so that none is above 1. Fast
# attention takes the maximum in one pass, and in a later one, as in its backward pass, makes the
# scores again and subtracts what it has kept. The same scores, from the same numbers, by the same
# line of code (`once` does nothing yet):


# %% tags=["measured"]
def largest(x, scale, once=lambda s: s):
    s = once(x * scale)
    return jnp.max(s, -1, keepdims=True).astype(jnp.float32)


def weights(x, scale, top, once=lambda s: s):
    s = once(x * scale)
    return jnp.exp(s.astype(jnp.float32) - top)


x = jax.random.normal(jax.random.key(0), (1000, 64), jnp.bfloat16)
scale = jnp.bfloat16(100)
kept = jax.jit(largest)(x, scale)
print("one operation at a time:", weights(x, scale, kept).max())
print("compiled:               ", jax.jit(weights)(x, scale, kept).max())

# %% [markdown]
# Compiled, some weights are larger than 1. Where did that come from? The first program rounded
# `x * scale` to bfloat16, as it says. In the second the product goes straight into a subtraction
# in float32, and XLA, which saw a number rounded to bfloat16 and widened again at once, left both
# out. That makes the score *more* precise, and no longer the one whose maximum was taken. With
# float32 alone it happens as well, in another way: a processor that has a fused multiply-add
# rounds `x * scale - top` once instead of twice. Either way two readers of one value see two
# values. The larger the scores, the larger half a digit of them, and it stands in an exponent:


# %% tags=["measured"]
def worst(dtype, once):
    """The largest weight, for each size of the scores."""
    first, second = (jax.jit(partial(f, once=once)) for f in (largest, weights))
    y = x.astype(dtype)
    return np.array([float(second(y, s, first(y, s)).max()) for s in map(dtype, sizes)])


sizes = 10.0 ** np.arange(0, 9.1, 0.5)
untouched = lambda s: s
cases = {
    "bfloat16": (worst(jnp.bfloat16, untouched), RED, "o-"),
    "float32": (worst(jnp.float32, untouched), ORANGE, "o-"),
    "bfloat16, single": (worst(jnp.bfloat16, numerics.single), BLUE, "s-"),
    "float32, single": (worst(jnp.float32, numerics.single), GREEN, ".--"),
}
_, ax = plt.subplots(figsize=(7, 3.6))
for name, (found, colour, style) in cases.items():
    ax.loglog(sizes, found, style, color=colour, label=name)
ax.axhline(float(np.finfo(np.float32).max), color=GREY, linestyle=":")
ax.text(1, 1e36, "the largest float32", color="0.4", size=8)
ax.set(xlabel="size of the scores (nats)", ylabel="largest weight (should be 1)")
ax.set(ylim=(0.1, 1e40))
ax.legend(frameon=False, loc="center left")
plt.show()

# %% [markdown]
# In bfloat16 scores of a hundred are enough, those of a thousand are off by orders of magnitude,
# and beyond ten thousand the weights are infinite. The cure is to say that a value has *one*
# rounding, whoever reads it: `numerics.single(x * scale)`. With it the blue and green lines stay
# at 1. It costs no memory in 16 bits, where it is an operation of its own that rounds.
#
# One can't see such a thing by reading, but a program can. `lint` traces a function, looks for a
# rounded value that feeds `exp(x - max x)` by two routes, and names the line and the call that
# mends it:


# %%
def softmax(x, scale):
    s = x * scale
    e = jnp.exp(s.astype("float32") - jnp.max(s, -1, keepdims=True).astype("float32"))
    return e / jnp.sum(e, -1, keepdims=True)


print(numerics.lint(softmax)(x, scale))

# %% [markdown]
# ## A NaN in a loop
#
# Here is a classic experiment: raise the learning rate a little at each step, and watch where
# training breaks. It is a logistic regression, its whole training one `scan`, on eight data sets
# at once by `vmap`, with the loss as a textbook has it.


# %%
def data(key):
    a, b, c = jax.random.split(key, 3)
    inputs = jax.random.normal(a, (64, 4))
    logits = inputs @ (3 * jax.random.normal(b, (4,)))
    return inputs, (jax.random.logistic(c, (64,)) < logits).astype(jnp.float32)


def textbook(w, inputs, labels):
    z = inputs @ w
    return jnp.mean(jnp.log(1 + jnp.exp(z)) - labels * z)


def train(inputs, labels, loss=textbook):
    def step(carry, _):
        w, rate = carry
        value, gradient = jax.value_and_grad(loss)(w, inputs, labels)
        return (w - rate * gradient, 1.3 * rate), value

    return jax.lax.scan(step, (jnp.zeros(4), 0.03), length=45)[1]


many = jax.vmap(data)(jax.random.split(jax.random.key(7), 8))
found = numerics.find_nonfinite(jax.vmap(train))(*many)
print(found)

# %% [markdown]
# One run of one compiled program, with a probe at each equation, and there it is: the operation,
# the number that it read, the cell and line, the turn of the scan, the place in the batch. The
# rest is what followed. (What `jax.debug_nans` does is to run again, without `jit`, one operation
# after the other; inside of a compiled scan it can't say which turn.) The cure is
# $\log(1 + e^z)$ by a function that knows about it.

# %%
curves = jax.jit(jax.vmap(train))(*many)
stable = lambda w, inputs, labels: jnp.mean(jax.nn.softplus(inputs @ w) - labels * (inputs @ w))
mended = jax.jit(jax.vmap(lambda *row: train(*row, loss=stable)))(*many)
first = found.first
assert first is not None
turn, row = first.iterations[0][1], dict(first.batch)["`inputs`"]

_, panels = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
for ax, lines, title in zip(
    panels, (curves, mended), ("log(1 + exp(z))", "softplus(z)"), strict=True
):
    ax.semilogy(lines.T, color=GREY, linewidth=1)
    ax.semilogy(lines[row], color=BLUE, linewidth=2, label=f"data set {row}")
    ax.axvline(turn, color=RED, linestyle=":", label=f"step {turn}")
    ax.set(xlabel="step (count)", xlim=(0, 44), title=title)
panels[0].set_ylabel("loss (nats)")
panels[0].legend(frameon=False, loc="upper left")
plt.show()
print("finite:", bool(jnp.isfinite(curves).all()), "→", bool(jnp.isfinite(mended).all()))

# %% [markdown]
# On the left the lines just end. On the right the learning rate is as wild as before, and the
# numbers survive it.
#
# NaNs like to hide in gradients. Here the value is fine, because a `where` has thrown the bad
# branch away; but the derivative of the branch is computed all the same, and zero times infinity
# is not zero. `find_nonfinite` knows the pattern where it is born, and `lint` before it is:


# %%
def length(v):
    return jnp.sum(jnp.where(v > 0, jnp.sqrt(v), 0.0))


speeds = jnp.array([4.0, 1.0, 0.0])
print("value", length(speeds), "gradient", jax.grad(length)(speeds))
print(numerics.find_nonfinite(jax.grad(length))(speeds))
print(numerics.lint(length)(speeds))

# %% [markdown]
# ## Digits that are lost before they are missed
#
# A variance can be had from two sums in one pass, $E[x^2] - E[x]^2$, and it has been, often. Where
# the mean is large beside the deviation, two large numbers are subtracted of which only the last
# digits differ, and those are rounded.


# %%
def one_pass(x):
    return jnp.mean(x * x) - jnp.mean(x) ** 2


print(numerics.lint(one_pass)(jax.ShapeDtypeStruct((1000,), jnp.float32)))

# %%
noise = jax.random.normal(jax.random.key(1), (1000,))
means = 10.0 ** np.arange(0, 6.1, 0.25)
errors = {name: [] for name in ("E[x²] - E[x]²", "jnp.var(x)")}
for mean in means:
    sample = jnp.float32(mean) + noise
    truth = np.var(np.asarray(sample, np.float64))
    for name, f in zip(errors, (one_pass, jnp.var), strict=True):
        errors[name].append(abs(float(f(sample)) - truth) / truth)

_, ax = plt.subplots(figsize=(7, 3.4))
for (name, error), colour in zip(errors.items(), (RED, BLUE), strict=True):
    ax.loglog(means, np.maximum(error, 1e-9), "o-", color=colour, label=name)
ax.axhline(1, color=GREY, linestyle=":")
ax.text(1.1, 1.6, "no digit is right", color="0.4", size=8)
ax.set(xlabel="mean, in standard deviations", ylabel="relative error (no unit)")
ax.set_title("The variance of 1000 float32 numbers", size=10)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The error grows with the *square* of the mean. But it is not the subtraction that makes it: a
# difference of two numbers that are close is exact. The digits were gone before, when the squares
# were rounded, and the subtraction only shows it. Whom should one blame in a larger program?
#
# `compare` runs a program at two precisions side by side, and beside them each equation once more:
# in the wide dtype, on the narrow run's operands. So it can tell the error that an equation
# *introduces* from the one that its operands brought along, which it only *passes on*. Here is a
# layer with such a variance in its norm, in bfloat16:


# %% tags=["measured"]
def layer(p, x):
    mean = jnp.mean(x, -1, keepdims=True)
    square = jnp.mean(x * x, -1, keepdims=True)
    variance = square - mean * mean
    n = (x - mean) * jax.lax.rsqrt(variance + 1e-6)
    h = jnp.tanh(n @ p["up"])
    s = h @ p["down"]
    return jax.nn.softmax(s)


rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
p = {"up": normal(64, 128), "down": normal(128, 32)}
rows = 8 * normal(16, 64) + 8.0
half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
report = numerics.compare(layer)(half(p), half(rows))
print(report)


# %%
def source(line):
    """The text of a line of this notebook."""
    match = re.match(r"In\[(\d+)\]:(\d+)", line)
    shell = get_ipython()
    assert shell is not None
    if match is None:
        return line
    return shell.user_ns["In"][int(match[1])].splitlines()[int(match[2]) - 1].strip()


forms = ("broadcast_in_dim", "stop_gradient", "reduce_max", "max")  # which round nothing
shown = [row for row in report.rows if row.operation not in forms]
_, ax = plt.subplots(figsize=(10, 0.24 * len(shown) + 1))
at = np.arange(len(shown))
ax.barh(
    at, [max(row.total, 1e-6) for row in shown], color=GREY, alpha=0.4, label="error of the result"
)
ax.barh(
    at, [max(row.introduced, 1e-6) for row in shown], height=0.4, color=RED, label="introduced here"
)
ax.set_yticks(at, [f"{row.operation:>12}   {source(row.line)[:46]:46}" for row in shown])
ax.tick_params(axis="y", labelsize=7, labelfontfamily="monospace")
ax.set(xlabel="error, relative to the result (no unit)", xscale="log", xlim=(1e-4, 0.3))
ax.axvline(2**-9, color=BLUE, linestyle=":", label="half a digit of bfloat16")
ax.invert_yaxis()
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
plt.show()

# %% [markdown]
# Read it from above. Each rounding introduces about half a digit (red), as it must in 16 bits. At
# the subtraction of the variance the error of the result (grey) jumps by a factor of twenty, and
# there is no red bar at all: it introduced nothing, it only had little left. What stands before it
# is to blame, and what follows passes it on.
#
# ## 16, 8 and 4 bits
#
# Why would anyone compute in such numbers? Because an operand of half the bits takes half the
# memory, half the traffic, and a quarter of the multiplier. What are they? So few that one can
# draw them all:

# %%
types = {
    "e5m2": jnp.float8_e5m2,
    "e4m3": jnp.float8_e4m3fn,
    "e2m1": jnp.float4_e2m1fn,
}
_, ax = plt.subplots(figsize=(10, 1.9))
for height, (name, dtype) in enumerate(types.items()):
    bits = 4 if name == "e2m1" else 8
    every = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every) & (every >= 0)])
    ax.plot(every, np.full(len(every), height), "|", markersize=18, color=BLUE)
    ax.text(8.2, height, f"to {every.max():,.0f}", va="center", size=8)
ax.set(xlim=(-0.05, 8.05), ylim=(-0.6, 2.6), xlabel="value")
ax.set_yticks(range(3), [f"{name}\n{4 if name == 'e2m1' else 8} bits" for name in types])
for side in ("top", "right", "left"):
    ax.spines[side].set_visible(False)
plt.show()

# %% [markdown]
# Like marks on a slide rule: evenly spaced between two powers of two, and twice as far apart in
# the next. `e4m3` has four bits of exponent and three of mantissa, `e2m1` eight numbers and their
# negatives. What matters is the error relative to a number, over all sizes of numbers:

# %%
sizes = 2.0 ** np.arange(-20, 20)
spread = np.geomspace(1, 2, 257)[:-1]
kinds = {
    "bfloat16": (jnp.bfloat16, BLUE),
    "float16": (jnp.float16, GREEN),
    "e5m2": (jnp.float8_e5m2, ORANGE),
    "e4m3": (jnp.float8_e4m3fn, RED),
    "e2m1": (jnp.float4_e2m1fn, "0.3"),
}
_, ax = plt.subplots(figsize=(8.5, 3.6))
for name, (dtype, colour) in kinds.items():
    exact = (sizes[:, None] * spread).astype(np.float32)
    top = float(jnp.finfo(dtype).max)
    rounded = np.asarray(jnp.asarray(exact).astype(dtype).astype(jnp.float32))
    error = np.sqrt(np.mean((rounded / exact - 1) ** 2, axis=1))
    ax.loglog(sizes, np.where(exact[:, -1] <= top, error, np.nan), color=colour, label=name, base=2)
ax.set(xlabel="size of a number (no unit)", ylabel="relative error of rounding (no unit)")
ax.set_ylim(2**-14, 2)
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# A flat floor whose height is the mantissa, and a slope to the left where the exponent ends and
# digits are lost one by one, until nothing is left (an error of 1). bfloat16 has a high floor and
# no slope in sight; that of float16 lies three bits lower, slopes below 2⁻¹⁴ and ends at 65504;
# and the floor of `e2m1` is not three powers of two wide.
#
# ## Scales
#
# So narrow formats come with *scales*: a number by which the elements are multiplied, so that they
# lie on the floor. One scale for a whole tensor will do as long as its numbers are of like size.
# Those of a language model aren't: a few channels are a hundred times as large as the others
# (Dettmers et al., 2022), and with 4 bits they push all others off the floor. Hence a scale for
# each block of 32 (`mxfp4`) or of 16 (`nvfp4`) along a row.

# %%
activations = np.array(rng.normal(size=(64, 128)), np.float32)
activations[:, [19, 84]] *= 60
activations = jnp.asarray(activations)


def one_scale(x):
    """4 bits, and one scale for all."""
    scale = jnp.max(jnp.abs(x)) / FORMATS["nvfp4"].largest
    return (x / scale).astype(jnp.float4_e2m1fn).astype(jnp.float32) * scale


ways = {"one scale": one_scale(activations)}
ways |= {f: quantise(activations, f).dequantise() for f in ("mxfp4", "nvfp4", "e4m3")}
ordinary = np.delete(np.arange(128), [19, 84])
_, panels = plt.subplots(1, 4, figsize=(12, 2.6), sharey=True)
for ax, (name, result) in zip(panels, ways.items(), strict=True):
    error = jnp.abs(result - activations)
    ax.imshow(error, cmap="Reds", norm=LogNorm(1e-3, 3), aspect="auto")
    size = lambda x: jnp.sqrt(jnp.mean(x[:, ordinary] ** 2))
    ax.set_title(f"{name}: {size(error) / size(activations):.1%}", size=10)
    ax.set_xlabel("channel (index)")
panels[0].set_ylabel("token (index)")
plt.colorbar(panels[-1].images[0], ax=panels, label="error (of size 1)", shrink=0.9)
plt.show()

# %% [markdown]
# In the titles stands the relative error of the ordinary channels. With one scale all of them are
# 0. A scale per block confines the damage to the block that an outlier is in, which is seen as a
# stripe, and it is the narrower the smaller the block. The 8 bits of `e4m3` need none of that
# here: their floor is 15 powers of two wide.
#
# ## A program in other numbers
#
# `precision` makes one program into the same in other numbers: products in `compute`, sums and
# exponentials in float32, gradients of parameters in float32, and formats of 8 or 4 bits for the
# operands of products if asked for. The formats are to the bit those of the hardware that has
# them, and are emulated elsewhere, so that one can try on a laptop whether a model would train:

# %%
inputs = jnp.asarray(rng.normal(size=(256, 16)), jnp.float32)
target = jnp.sin(2 * inputs[:, :1]) * inputs[:, 1:2] + 0.5 * inputs[:, 2:3]
start = {"a": 1.5 * normal(16, 64), "b": normal(64, 64), "c": normal(64, 1)}


def regression(p):
    h = jnp.tanh(jnp.tanh(inputs @ p["a"]) @ p["b"])
    return jnp.mean((h @ p["c"] - target) ** 2)


def descend(loss, steps=200):
    def step(carry, _):
        p, speed = carry
        value, gradient = jax.value_and_grad(loss)(p)
        speed = jax.tree.map(lambda s, g: 0.9 * s - 0.02 * g, speed, gradient)
        return (jax.tree.map(jnp.add, p, speed), speed), value

    still = jax.tree.map(jnp.zeros_like, start)
    return jax.jit(lambda: jax.lax.scan(step, (start, still), length=steps)[1])()


policies = {"f32": "0.2", "bf16": BLUE, "fp8": GREEN, "nvfp4": RED}
trained = {name: descend(precision(regression, name)) for name in policies}

_, ax = plt.subplots(figsize=(7.5, 3.6))
for name, colour in policies.items():
    style = {"linewidth": 4, "alpha": 0.35} if name == "f32" else {"linewidth": 1.3}
    ax.semilogy(trained[name], color=colour, label=name, **style)
ax.set(xlabel="step (count)", ylabel="mean square error (no unit)")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# 16 bits lie on the curve of 32; 8 bits follow it down to a hundredth; 4 bits learn, and stop
# learning at a level that their rounding sets.
#
# One trap is left, of float16. Gradients are small numbers, and the slope of float16 begins at
# 2⁻¹⁴, where those of many models lie. So the loss is multiplied before it is differentiated, and
# the gradients are divided after, in float32. `LossScale` does it, leaves out steps in which
# something overflowed, and looks for the largest factor that works:

# %%
tiny = lambda p: 1e-5 * regression(p)
narrow = precision(tiny, "f16")
truth = jax.grad(tiny)(start)["b"]
plain = jax.grad(narrow)(start)["b"]
scaled = LossScale(jnp.float32(2.0**20)).value_and_grad(narrow)(start)[1]["b"]

_, panels = plt.subplots(1, 3, figsize=(11, 2.8), sharey=True)
bins = np.arange(-40, -15, 0.5)
for ax, (name, gradient) in zip(
    panels, {"float32": truth, "float16": plain, "float16, scaled": scaled}.items(), strict=True
):
    flat = np.abs(np.asarray(gradient)).ravel()
    ax.hist(np.log2(flat[flat > 0]), bins, color=BLUE)
    ax.axvspan(-24, -14, color=ORANGE, alpha=0.25)
    ax.set_title(f"{name}: {np.mean(flat == 0):.0%} are 0", size=10)
    ax.set_xlabel("size (power of 2)")
panels[0].set_ylabel("gradients (count)")
plt.show()

# %% [markdown]
# Orange is where float16 loses digits; left of it there is nothing. With a scale, the same program
# in the same numbers has the gradients of float32.
#
# ## What to take home
#
# * A compiler may see one value twice and round it differently. Where two readers must agree, say
#   `numerics.single`.
# * Ask for the *birth* of a NaN, not for its presence: `find_nonfinite` names operation, operands,
#   line, turn and example from one run.
# * An error is introduced in one place and seen in another; `compare` tells them apart.
# * `lint` knows seven ways to lose digits, and reads programs without running them.
# * Narrow numbers have a floor and a slope. Scales keep numbers on the floor, and the fewer the
#   bits, the smaller the block that a scale may serve.
