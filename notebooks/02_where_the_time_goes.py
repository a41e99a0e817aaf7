# %% [markdown]
# # Where the time goes
#
# A program on an accelerator spends its time on four things. It **computes**; it **moves**
# numbers between memory and the units that compute; it **sends** them to other devices; and it
# does **none of these**, while the host gets the next piece of work ready. They are four
# different illnesses with four different cures: a faster kernel doesn't help a program that waits
# for memory, and less memory traffic doesn't help one that waits for Python.
#
# So the first question is always *which*. This notebook takes a CPU apart to see each of the four
# by itself, then asks the question of a transformer on GPUs that aren't here, from nothing but
# its shapes. It ends with a fifth thing that no program mentions: the numbers themselves.
#
# Times below are of the machine that ran this notebook, and other machines have others. What was
# counted, and not timed, is the same everywhere.

# %%
import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.core.getipython import get_ipython
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from xform import causal, cost, device, explain, flex_attention, hfu, mfu, roofline

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "0.6"


def seconds(f, *args, runs=7):
    """The shortest of some runs: what the machine can do when nothing disturbs it."""
    jax.block_until_ready(f(*args))
    turns = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        turns.append(time.perf_counter() - start)
    return min(turns)


# %% [markdown]
# ## Overhead: the price of asking
#
# Add 1 to an array of one number, then to one of two, of four, and so on to 16 million.

# %% tags=["measured"]
sizes = 2 ** np.arange(0, 25, 2)
add = jax.jit(lambda x: x + 1)
times = [seconds(add, jnp.ones(n), runs=20) for n in sizes]

_, ax = plt.subplots(figsize=(6.5, 3.4))
ax.loglog(sizes, np.array(times) * 1e6, "o-", color=BLUE)
ax.axhline(times[0] * 1e6, color=GREY, linestyle=":")
ax.text(sizes[-1], times[0] * 1.3e6, "overhead", ha="right", size=8)
ax.set(xlabel="array (numbers)", ylabel="time (µs)", title="x + 1")
plt.show()

# %% [markdown]
# On the left the time doesn't depend on the size: it is spent on Python, on JAX's dispatch, on
# the launch. (It jumps once, where JAX begins to hand a computation to another thread.) There are
# thousands of numbers that cost what one costs. A program that is made of such calls is
# *overhead-bound*, and it gets faster by asking for more at once: a larger batch, a `jit` around
# more of it, a `scan` in the place of a loop.
#
# On the right the time grows with the size. But an addition takes a fraction of a nanosecond, and
# this is more. What is it?
#
# ## Memory: arithmetic that costs nothing
#
# Multiply and add, once, twice, up to 256 times, for each number of a large array, all in one
# kernel. `cost` says how many operations that makes, and how many bytes a perfect kernel would
# move.


# %%
def polynomial(turns):
    def f(x):
        y = x
        for _ in range(turns):
            y = y * x + 0.5
        return y

    return jax.jit(f)


large = jax.ShapeDtypeStruct((2**22,), jnp.float32)
turns = 2 ** np.arange(0, 9)
counted = [cost(polynomial(n))(large) for n in turns]
intensity = [float(c.flops / c.fused_bytes) for c in counted]
print("operations per byte:", *intensity)

# %% tags=["measured"]
x = jnp.linspace(0, 0.5, 2**22)
times = np.array([seconds(polynomial(n), x) for n in turns])

_, ax = plt.subplots(figsize=(6.5, 3.4))
ax.semilogx(turns, times * 1e3, "o-", color=BLUE, base=2)
ax.set(xlabel="multiply-adds for each number (count)", ylabel="time (ms)", ylim=(0, None))
ax.set_title("4 million numbers", size=10)
plt.show()

# %% [markdown]
# The first multiply-adds are free. They run in the shadow of loading and storing, which takes the
# same time whatever is done in between. This is why compilers *fuse*: two kernels of one
# multiply-add each pay for memory twice, and one kernel of two pays once. A program on this side
# is *memory-bound*, and operations are not what to save in it.
#
# Both sides in one picture are a **roofline** (Williams, Waterman and Patterson, 2009). To the
# right goes the *intensity*, operations per byte. A device that moves `b` bytes and computes `p`
# operations a second can't do more than `min(p, b · intensity)` of them: a roof with a slope and
# a flat part. `device` knows both numbers of the usual GPUs, from their makers; of a CPU it
# measures them.

# %% tags=["measured"]
here = device("cpu")
sides = 2 ** np.arange(5, 11)
matmul = jax.jit(lambda x: x @ x)
square = [jnp.ones((n, n)) / n for n in sides]
products = [cost(matmul)(x) for x in square]

_, ax = plt.subplots(figsize=(7.5, 4))
span = np.geomspace(0.1, 1000, 200)
peak = here.peak["float32"]
ax.loglog(span, np.minimum(peak, here.bandwidth * span) / 1e9, color=GREY, label="the roof")
ax.loglog(
    intensity,
    [c.flops / t / 1e9 for c, t in zip(counted, times, strict=True)],
    "o",
    color=BLUE,
    label="multiply-adds",
)
ax.loglog(
    [float(c.flops / c.fused_bytes) for c in products],
    [c.flops / seconds(matmul, x, runs=20) / 1e9 for c, x in zip(products, square, strict=True)],
    "s",
    color=ORANGE,
    label="matrix products, 32² to 1024²",
)
ax.set(xlabel="operations per byte", ylabel="operations per second (10⁹/s)")
ax.set_title(f"This machine: {peak / 1e9:.0f} GFLOP/s, {here.bandwidth / 1e9:.1f} GB/s", size=10)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Points below the slope wait for something else than what memory can do at best: small products
# for their overhead, multiply-adds for the fresh pages that each new result is given. Points above
# it show where the model ends: what fits into a cache need not come from memory. And long chains of
# multiply-adds end far below the flat part, since each waits for the result of the one before it,
# which neither side of the roof knows of. A product of matrices has many sums to add to meanwhile;
# it is the one thing that a processor is built to do at its peak.
#
# ## A transformer, from its shapes
#
# Now a GPU that we don't have. Here is a transformer of a few lines, its layers under `scan`:


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(x, p):
    B, T, width = x.shape
    q, k, v = (a.reshape(B, T, -1, p["size"].shape[0]) for a in jnp.split(norm(x) @ p["in"], 3, -1))
    x = x + flex_attention(q, k, v, mask_mod=causal()).reshape(B, T, width) @ p["out"]
    h = norm(x) @ p["up"]
    h = jax.nn.gelu(h)
    return x + h @ p["down"]


def loss(p, x, remat=False):
    step = jax.checkpoint(layer) if remat else layer
    x, _ = jax.lax.scan(lambda x, p: (step(x, p), None), x, p)
    return jnp.mean(norm(x).astype(jnp.float32) ** 2)


def shapes(layers, width, size, dtype):
    """The parameters, as shapes; `size` is that of a head."""
    of = lambda *shape: jax.ShapeDtypeStruct((layers, *shape), dtype)
    return {
        "size": of(size), "in": of(width, 3 * width), "out": of(width, width),
        "up": of(width, 4 * width), "down": of(4 * width, width),
    }  # fmt: skip


large = shapes(32, 4096, 128, jnp.bfloat16)
tokens = jax.ShapeDtypeStruct((2, 4096, 4096), jnp.bfloat16)
costs = cost(loss)(large, tokens)
costs

# %% [markdown]
# Nothing was compiled, and no weight exists: these 6 billion parameters are shapes. Each line has
# its operations, its bytes if every equation went to memory and back (`bytes`), and its bytes if
# every straight run of them were one perfect kernel (`fused`). `roofline` holds them against a
# device:

# %%
roofline(costs, "H200")

# %% [markdown]
# At this size, products decide. How is that when fewer tokens are in flight, as when a model
# writes text? Every token has to see every weight once, so that the bytes of the weights are
# there however few tokens share them:


# %%
def per_token(batch, on="H200"):
    """Least seconds per token of a step in which each of `batch` texts gets one."""
    x = jax.ShapeDtypeStruct((batch, 1, 4096), jnp.bfloat16)
    lines = roofline(cost(loss)(large, x), on).lines
    return [sum(getattr(b, what) for b in lines) / batch for what in ("compute", "memory")]


batches = 2 ** np.arange(0, 12)
compute, memory = np.array([per_token(int(b)) for b in batches]).T
h200 = device("H200")
ridge = h200.peak["bfloat16"] / h200.bandwidth

_, ax = plt.subplots(figsize=(6.5, 3.6))
ax.loglog(batches, memory * 1e6, color=ORANGE, label="to move")
ax.loglog(batches, compute * 1e6, color=BLUE, label="to compute")
ax.loglog(batches, np.maximum(compute, memory) * 1e6, "o", color="0.2", label="at best")
ax.axvline(ridge, color=GREY, linestyle=":")
ax.text(ridge * 1.1, 800, f"{ridge:.0f} operations\nper byte", size=8)
ax.set(xlabel="texts that get a token in one step (count)", ylabel="time per token (µs)")
ax.set_title("A model of 6 billion weights in bfloat16 on an H200, no cache read", size=10)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# One text alone and a hundred together take the same time per step. The corner is where the batch
# is as large as the device's own ratio of operations to bytes. Everybody who serves language
# models lives left of it and tries to get to the right.
#
# ## MFU and HFU: the share that was used
#
# The share of a device's peak that a training step uses is its *utilisation*, and there are two,
# because a program may do more than its model asks for. **MFU** counts the model's operations: a
# backward pass as twice the forward, nothing that is computed again. **HFU** counts all that ran.
# Recomputation (`jax.checkpoint`, which keeps only what enters a layer) adds a forward pass, and
# only one of the two numbers may profit from it:

# %%
small = shapes(4, 256, 64, jnp.float32)
text = jax.ShapeDtypeStruct((1, 512, 256), jnp.float32)
steps = {
    "plain": jax.jit(jax.grad(loss)),
    "recomputed": jax.jit(jax.grad(lambda p, x: loss(p, x, remat=True))),
}
counts = {name: cost(step)(small, text) for name, step in steps.items()}
for name, c in counts.items():
    print(
        f"{name:10}  model {float(c.model_flops) / 1e9:.2f} GFLOP, "
        f"executed {float(c.matrix_flops) / 1e9:.2f} GFLOP"
    )

# %% tags=["measured"]
keys = iter(jax.random.split(jax.random.key(0), 8))
random = lambda s: jax.random.normal(next(keys), s.shape, s.dtype) / s.shape[-2] ** 0.5
weights, rows = jax.tree.map(random, small), jax.random.normal(next(keys), text.shape)
taken = {name: seconds(step, weights, rows, runs=4) for name, step in steps.items()}
# A peak that is measured is a lower bound: what has just been seen can be done, and a bit more.
seen = max(float(counts[name].matrix_flops) / t for name, t in taken.items())
here = replace(here, peak={**here.peak, "float32": max(peak, 1.01 * seen)})
for name, t in taken.items():
    print(f"{name}: {t * 1e3:.0f} ms")
    print("   ", mfu(counts[name], t, here))
    print("   ", hfu(counts[name], t, here))

# %% [markdown]
# Whatever the times: in the second pair HFU is further above MFU, since a fifth of what the
# machine did was work that the model hadn't asked for. If recomputation makes a step longer, MFU
# falls with it, while HFU may stay where it is; so a report that gives one number should say
# which. And a time that is too short to be true is an error and not a record, as when one forgets
# to wait for the result:

# %%
try:
    mfu(counts["plain"], 1e-6, "H200")
except ValueError as error:
    print(error)

# %% [markdown]
# ## Communication: the third roof
#
# Eight GPUs train one model on a part of the batch each, and add up their gradients. A mesh need
# not exist to be counted on: an `AbstractMesh` has names and sizes, and `cost` counts what each
# device sends over each axis.

# %%
mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def parallel(p, x):
    """The gradient of a loss over a batch that is split over `data`: JAX adds up, once."""

    def local(p, x):
        return jax.grad(lambda p: jax.lax.pmean(loss(p, x), "data"))(p)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p, x)


def parts(texts):
    """Least seconds of compute, memory and network for so many texts of 512 tokens a device."""
    x = jax.ShapeDtypeStruct((8 * texts, 512, 4096), jnp.bfloat16)
    lines = roofline(cost(parallel)(large, x), "H200").lines
    return [sum(getattr(b, what) for b in lines) for what in ("compute", "memory", "network")]


texts = 4 ** np.arange(0, 4)
times = np.array([parts(int(n)) for n in texts]).T

_, ax = plt.subplots(figsize=(6.5, 3.6))
for what, line, colour in zip(
    ("compute", "memory", "network"), times, (BLUE, ORANGE, RED), strict=True
):
    ax.loglog(512 * texts, line * 1e3, "o-", color=colour, label=what)
ax.set(xlabel="tokens on each device (count)", ylabel="time at best (ms)")
ax.set_title("A step of 6 billion weights on 8 × H200, gradients added over NVLink", size=10)
ax.set_xticks(512 * texts, [f"{512 * n:,}" for n in texts], size=8)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Gradients weigh the same however many tokens made them. Left of the crossing a step is
# *communication-bound*; right of it, what is sent can hide behind what is computed, if the
# program is written so that it may. The crossing moves with the network: over one that is ten
# times slower, each device needs ten times the tokens.
#
# ## What really ran
#
# Everything so far was counted from the program as it is written. A compiler fuses, duplicates
# and reorders it. `explain` reads the compiled program, line by line, runs it, and splits the
# wall time into the four. Its lines are those of the cell that defined `layer`. The ones that
# multiply matrices need not lead: on a CPU an elementary function, such as the tanh inside of
# `gelu`, takes its time.

# %% tags=["measured"]
report = explain(steps["plain"])(weights, rows)


def source(line):
    """The text of a line of this notebook."""
    cell, row = map(int, re.findall(r"\d+", line)[:2])
    shell = get_ipython()
    assert shell is not None
    return shell.user_ns["In"][cell].splitlines()[row - 1].strip()


spent = {x.line: x.seconds for x in report.lines if x.seconds and x.line.startswith("In[")}
slowest = sorted(spent, key=lambda line: -spent[line])[:7]
_, ax = plt.subplots(figsize=(9, 3.2))
ax.barh(range(len(slowest)), [spent[line] * 1e3 for line in slowest], color=BLUE)
ax.set_yticks(range(len(slowest)), [source(line)[:58] for line in slowest], family="monospace")
ax.set(xlabel="measured time, summed over threads (ms)")
ax.tick_params(axis="y", labelsize=8)
ax.invert_yaxis()
plt.show()
run = report.run
assert run is not None
parts_of = ("compute", "memory", "communication", "idle")
print(
    f"{run.wall / 1e6:.1f} ms =", " + ".join(f"{p} {getattr(run, p) / 1e6:.1f}" for p in parts_of)
)

# %% [markdown]
# ## Why the numbers matter
#
# One more thing, which no count of operations shows. The same product of the same shapes runs
# faster on zeros than on random numbers (H. He, 2024). Not because zeros are skipped. A chip
# spends energy when a bit *changes*; at its power limit it lowers its clock, and a product that
# flips fewer bits keeps a higher one.
#
# Is that so? A tensor core takes 16 numbers at once along the dimension that is summed over, so
# that a register gets a number, then the one 16 places further. How many of the 16 bits of a
# bfloat16 change between the two can be counted here. How fast a product of 8192³ is, and at which
# clock, was measured on an H200 by `benchmarks/data_power.py`, on the same seven kinds of numbers.

# %%
draw = jax.random.key(1)
normal = jax.random.normal(draw, (1024, 256))
kinds = {
    "zeros": jnp.zeros_like(normal),
    "NaN": jnp.full_like(normal, jnp.nan),
    "0 and 1 by turns": jnp.indices(normal.shape).sum(0) % 2,
    "-1, 0 and 1": jax.random.randint(draw, normal.shape, -1, 2),
    "3 of 4 are 0": normal * (jax.random.uniform(draw, normal.shape) < 0.25),
    "uniform": jax.random.uniform(draw, normal.shape),
    "normal": normal,
}
MEASURED = {  # TFLOP/s and MHz
    "zeros": (832, 1800), "NaN": (832, 1798), "0 and 1 by turns": (824, 1786),
    "-1, 0 and 1": (803, 1740), "3 of 4 are 0": (789, 1710), "uniform": (779, 1687),
    "normal": (694, 1497),
}  # fmt: skip


@jax.jit
def flips(x):
    """Bits that change from each number to the one that follows it in its register."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return jnp.mean(jax.lax.population_count(bits[16:] ^ bits[:-16]).astype(jnp.float32))


_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
for name, (speed, clock) in MEASURED.items():
    changed = float(flips(kinds[name]))
    left.plot(changed, speed, "o", color=ORANGE)
    right.plot(clock / 1e3, speed, "o", color=BLUE)
    words = {"zeros": "zeros, NaN", "NaN": ""}.get(name, name)
    left.annotate(words, (changed, speed), xytext=(8, -3), textcoords="offset points", size=8)
clocks = np.array([1.45, 1.85])
right.plot(clocks, clocks * 832 / 1.8, color=GREY, zorder=0)
right.text(1.62, 725, "speed in proportion", size=8, color="0.4")
left.set(xlabel="bits that change, counted (of 16)", ylabel="speed, measured (10¹² operations/s)")
left.set(xlim=(-0.4, 7.5), title="The more bits change, the slower")
right.set(xlabel="clock, measured (GHz)", title="and the clock explains it")
plt.show()

# %% [markdown]
# On the left, nothing but flipped bits puts seven kinds of data in the order of their speed; all
# that doesn't change is about as fast as zeros are, even NaN. (It is a model of one register. A
# chip has others, and multipliers and wires, whose bits flip along with these.) On the right, speed
# is proportional to the clock, to half a per cent: no operation was skipped. With zeros the card
# drew 407 W. With normal numbers it was held at its limit of 700 W, and at a clock for which these
# are enough. So a benchmark on zeros overstates this product by 20 %. The moral for everybody else:
# time programs on random data.
#
# ## What to take home
#
# * Ask *which of the four* before asking *how to make it faster*. Overhead wants larger pieces;
#   memory wants fusion and smaller types; communication wants to be hidden, or more work for each
#   byte; compute wants better kernels.
# * Operations per byte, against the device's own ratio, decide between the middle two.
# * Quote utilisation with its convention. MFU is about the model, HFU about the machine.
# * `cost`, `memory` and `roofline` answer from shapes alone, for devices that are elsewhere;
#   `explain` answers from what was compiled and run.
