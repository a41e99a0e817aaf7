# %% [markdown]
# # Recompute or reuse
#
# A derivative looks back. To know how a product moves with one factor, one needs the other
# factor; so the backward pass of a network, which begins at its end, asks for values that were
# made on the way there. Either they were kept, which takes memory, or they are computed again,
# which takes time. Most programs decide this by hand, layer by layer, with `jax.checkpoint`.
#
# It is a well-posed question, and it has an exact answer, found in 1956 by people who thought of
# railways: a **minimum cut**. This notebook looks at what a gradient holds, finds a minimum cut
# by trying all choices and then by pushing flow through a graph, lets `xform.remat` do the same to
# eight layers within a budget of bytes, and checks it against what the compiler really did.

# %%
import itertools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

import xform as xf

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"
# A program from the cache of an earlier run tells nothing of how it was compiled.
jax.config.update("jax_enable_compilation_cache", False)

# %% [markdown]
# ## What a gradient keeps
#
# One layer of the kind that most language models are made of: a norm, then two products of which
# one gates the other, then a product back. `jax.vjp` returns the value and the backward pass, and
# this is a pytree whose leaves are what it has kept:


# %%
def norm(x):
    m = jnp.mean(x * x, -1, keepdims=True) + 1e-6
    return x * jax.lax.rsqrt(m)


def layer(x, p):
    n = norm(x)
    h = n @ p["gate"]
    u = n @ p["up"]
    s = 1 / (1 + jnp.exp(-h))
    y = h * s * u
    return x + y @ p["down"]


ROWS, WIDTH, HIDDEN = 512, 128, 384
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
sizes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
params = [{name: normal(*size) for name, size in sizes.items()} for _ in range(8)]
x = normal(ROWS, WIDTH)

_, backward = jax.vjp(layer, x, params[0])
kept = sorted(jax.tree.leaves(backward), key=lambda leaf: -leaf.nbytes)
print(*(f"{leaf.nbytes:9,} bytes  {jax.typeof(leaf).str_short()}" for leaf in kept), sep="\n")

# %% [markdown]
# Among them are the three weights (of 196,608 bytes) and `x`, which are there in any case. The
# rest is the price of a gradient: seven arrays of 512 × 384 for a layer that passes on one of
# 512 × 128. Now stack eight layers. Each leaves its values behind on the way forward, and the
# way back takes them up one after the other. `xf.remat.report` knows how many bytes are held at
# each operation, without running any:


# %%
def loss(params, x):
    for p in params:
        x = layer(x, p)
    return jnp.mean(norm(x) ** 2)


def report_of(budget):
    return xf.remat.report(loss, budget=budget, argnums=0)(params, x)


report = report_of("all")
held = np.array([bytes_ for bytes_, _ in report.curve]) / 1e6
turn = int(held.argmax())


def fill(ax, held, colour, **options):
    time = np.linspace(0, 100, len(held))
    ax.fill_between(time, held, color=colour, step="mid", linewidth=0, **options)


_, ax = plt.subplots(figsize=(7, 3.2))
fill(ax, held, BLUE, alpha=0.85)
ax.axvline(100 * turn / len(held), color=GREY, linestyle=":")
ax.text(100 * turn / len(held) - 1, 18.5, "forward", ha="right", size=9)
ax.text(100 * turn / len(held) + 3, 18.5, "backward", size=9)
ax.set(xlabel="operations done (%)", ylabel="held (MB)", xlim=(0, 100), ylim=(0, 20))
ax.set_title("Value and gradients of 8 layers, beside arguments and results", size=10)
plt.show()

# %% [markdown]
# A mountain with its summit in the middle, where all layers have left their values and none has
# been taken up. It is this summit that decides whether a model fits on a device. It may be
# lowered, for a price.
#
# ## All choices there are
#
# Back to one layer, as a graph: what each value is made of, how large it is, and how much work it
# is to make. Elementwise work counts as none, since a compiler does it inside of the kernel that
# reads the result. Sums over rows, such as the mean in the norm, are neither free nor worth much;
# we say that they never run twice. The backward pass wants those in `WANTED`. Each of them is the
# other factor of some product: `h * s` wants `h` and `s`, `y @ p["down"]` wants `y`, and so on.

# %%
WIDE, NARROW, COLUMN = 4 * ROWS * HIDDEN, 4 * ROWS * WIDTH, 4 * ROWS
PRODUCT, NEVER = 2 * ROWS * WIDTH * HIDDEN, float("inf")
GRAPH = {  # value: what it is made of, its bytes, operations to make it
    "m": ("x", COLUMN, NEVER),
    "r": ("m", COLUMN, 0),
    "n": ("xr", NARROW, 0),
    "h": ("n", WIDE, PRODUCT),
    "u": ("n", WIDE, PRODUCT),
    "s": ("h", WIDE, 0),
    "a": ("hs", WIDE, 0),
    "y": ("au", WIDE, 0),
}
WANTED = "rnhusay"


def again(saved):
    """What runs a second time if these values are saved: whatever is wanted and not there."""
    runs, todo = set(), [v for v in WANTED if v not in saved]
    while todo:
        v = todo.pop()
        runs.add(v)
        todo += [of for of in GRAPH[v][0] if of != "x" and of not in saved and of not in runs]
    return runs


choices = []
for flags in itertools.product((False, True), repeat=len(GRAPH)):
    saved = {v for v, flag in zip(GRAPH, flags, strict=True) if flag}
    bytes_, work = sum(GRAPH[v][1] for v in saved), sum(GRAPH[v][2] for v in again(saved))
    if work < NEVER:
        choices.append((bytes_, work, ", ".join(sorted(saved))))
best = []
for choice in sorted(choices):  # the smallest first: what needs more bytes has to save work
    if not best or choice[1] < best[-1][1]:
        best.append(choice)
for bytes_, work, saved in best:
    print(f"save {saved:8} {bytes_:9,} bytes, {work / 1e6:5.1f} MFLOP again")

# %%
_, ax = plt.subplots(figsize=(7, 3.6))
bytes_, work = np.array([choice[:2] for choice in choices]).T
ax.plot(bytes_ / 1e6, work / 1e6, "o", color=GREY, alpha=0.35, label="a choice of what to save")
bytes_, work = np.array([choice[:2] for choice in best]).T
ax.step(bytes_ / 1e6, work / 1e6, where="post", color=BLUE, linewidth=1)
ax.plot(bytes_ / 1e6, work / 1e6, "o", color=BLUE, label="none is better in both")
for at, height, name in best:
    ax.annotate(name, (at / 1e6, height / 1e6), (5, 6), textcoords="offset points", size=9)
ax.plot(sum(GRAPH[v][1] for v in WANTED) / 1e6, 0, "o", color=RED, label="all that is wanted")
ax.set(xlabel="saved (MB)", ylabel="computed again (MFLOP)", ylim=(-5, 115))
ax.set_title(f"One layer: all {len(choices)} choices in which no mean is taken twice", size=10)
ax.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# Saving everything that is wanted is a poor choice: two of the wide arrays and a column are
# enough, and no product runs twice. And look at what is saved. The backward pass never asks for
# `m`, the mean of squares. But from its 2 kB both `r` and `n` follow for nothing. The best things
# to keep are the *narrow places* that much else flows from.
#
# ## A cut
#
# With eight values there are 256 choices; with eight layers there are ten to the 19. Here is the
# trick that makes them easy. Draw the graph with a source and a sink, as pipes: from the source
# into every operation goes a pipe as wide as the price of running it again; from an operation to
# its value one as wide as the value's bytes; whatever is wanted drains into the sink, and a value
# must be at hand where an operation reads it, for which there is a pipe without bounds. To *cut*
# sink from source one has to sever, for each wanted value, either the pipe of its bytes (save it)
# or the pipes of the work that makes it. So the cheapest cut is the cheapest choice. And the
# cheapest cut is as wide as the largest flow (Ford and Fulkerson, 1956), which is found step by
# step, by pushing more through wherever there is room.


# %%
def minimum_cut(price):
    """What to save if repeating an operation costs `price` bytes, and the cost of that."""
    of = {"source": 0, "sink": 1}
    number = lambda node: of.setdefault(node, len(of))
    pipes, endless = {}, 2**30
    for v, (operands, bytes_, work) in GRAPH.items():
        cost = endless if work == NEVER else int(price * work)
        pipes[number("source"), number("make " + v)] = cost
        pipes[number("make " + v), number(v)] = bytes_
        for operand in set(operands) - {"x"}:
            pipes[number(operand), number("make " + v)] = endless
        if v in WANTED:
            pipes[number(v), number("sink")] = endless
    at, width = np.array(list(pipes)).T, np.array(list(pipes.values()), np.int32)
    network = csr_matrix((width, tuple(at)), (len(of), len(of)))
    flow = maximum_flow(network, 0, 1)
    room = network - flow.flow
    room.eliminate_zeros()
    filled = {*breadth_first_order(room, 0, return_predecessors=False).tolist()}
    return {v for v in GRAPH if of["make " + v] in filled and of[v] not in filled}, flow.flow_value


for price in (0.02, 0.01):
    saved, flow = minimum_cut(price)
    cheapest = min(bytes_ + (price * work) for bytes_, work, _ in choices)
    print(f"price {price}: save {', '.join(sorted(saved)):7}  flow {flow:9,}", end="")
    print(f"   cheapest of all choices {cheapest:9,.0f}")

# %% [markdown]
# The *price*, in bytes for an operation, is the one knob: at a high one nothing that costs work
# runs again, at zero all of it does. Here the mind changes at 1/64: a number of the product takes
# 4 bytes to keep and 2 · 128 operations to make. A single price decides for a whole program, and
# each value is dealt with by its own merits: the deeper a product, the dearer to repeat. Below,
# blue is saved, orange is computed again, and arrows are heavy where they stand for work.

# %%
PLACE = {
    "x": (0, 1.2), "m": (1, 2), "r": (2, 2), "n": (3, 1.2), "h": (4.2, 2), "u": (4.2, 0.4),
    "s": (5.2, 2.6), "a": (6.2, 2), "y": (7.2, 1.2),
}  # fmt: skip
SIZE = {"x": NARROW, **{v: size for v, (_, size, _) in GRAPH.items()}}


def draw(ax, saved):
    runs = again(saved)
    for v, (operands, _, work) in GRAPH.items():
        for operand in operands:
            (x0, y0), (x1, y1) = PLACE[operand], PLACE[v]
            heavy = ORANGE if v in runs else "0.3"
            colour, width = (heavy, 3) if work else (GREY, 1)
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 12}
            ax.annotate("", (x1, y1), (x0, y0), arrowprops={**arrow, "shrinkB": 12})
    for v, (px, py) in PLACE.items():
        paint = GREY if v == "x" else BLUE if v in saved else ORANGE
        ax.scatter(px, py, s=420, color=paint, edgecolor="0.3", zorder=3)
        middle = {"ha": "center", "va": "center", "zorder": 4}
        ax.text(px, py, v, color="white", **middle)
        ax.text(px, py - 0.45, f"{SIZE[v] / 1e3:.0f} kB", size=7, color="0.35", **middle)
    ax.set(xlim=(-0.4, 7.6), ylim=(-0.3, 2.9))
    ax.set_axis_off()


_, panels = plt.subplots(1, 2, figsize=(11, 2.9))
for ax, price in zip(panels, (0.02, 0.01), strict=True):
    saved, _ = minimum_cut(price)
    draw(ax, saved)
    total = sum(GRAPH[v][1] for v in saved)
    products = sum(v in "hu" for v in again(saved))
    ax.set_title(f"saved {total / 1e3:,.0f} kB, {products} products run again", size=10)
plt.show()

# %% [markdown]
# `xf.remat` does this to a program rather than to a table. It takes the graph from the program's
# linearisation, sizes and work from its types, and finds the cut by Dinic's algorithm. Here is
# what it says of the same layer; the two arrays and the column are the ones that we found.

# %%
alone = xf.remat.report(lambda p, x: jnp.sum(layer(x, p)))(params[0], x)
print(*alone.saved, sep="\n")

# %% [markdown]
# ## A budget
#
# Nobody knows the right price. What one knows is how many bytes there are. So `remat` takes
# those: `budget` is what value and gradients may need at once beside arguments and results, in
# bytes, and the plan is the fastest one whose *summit* is below it. (A float lies between the
# least of all plans, 0.0, and the one that repeats no work, 1.0.)

# %%
step = jax.jit(jax.value_and_grad(xf.remat(loss, budget=12_000_000)))  # all that it takes
print(report_of(12_000_000))

# %% [markdown]
# `saved` and `again` tell by line what is kept and what runs twice. Some layers keep one wide
# array and others none, because a budget may end between two layers. Here are the curves of four
# budgets:

# %%
work_of = lambda f: float(xf.cost(jax.value_and_grad(f))(params, x).matrix_flops)
plain = work_of(loss)
budgets = {"all": BLUE, 12_000_000: GREEN, 10_500_000: ORANGE, 0.0: RED}
_, panels = plt.subplots(1, 4, figsize=(12, 2.9), sharey=True)
for ax, (budget, colour) in zip(panels, budgets.items(), strict=True):
    told = report_of(budget)
    fill(ax, [bytes_ / 1e6 for bytes_, _ in told.curve], colour)
    more = work_of(xf.remat(loss, budget=budget)) / plain
    asked = f"{budget / 1e6:.1f} MB" if isinstance(budget, int) else repr(budget)
    ax.set_title(f"budget={asked}\npeak {told.peak / 1e6:.1f} MB, work × {more:.2f}", size=9)
    ax.set(xlabel="operations done (%)", xlim=(0, 100))
panels[0].set_ylabel("held (MB)")
plt.show()

# %% [markdown]
# The mountain becomes a comb: in the end, only what lies between layers is kept, or between
# groups of layers, and each is climbed again right before it is descended. The peak that a plan
# is held to is above the top of its curve: a quarter of what is at work at the time is added for
# what a compiler does that can't be foreseen.
#
# ## What the compiler did
#
# For all these are plans. XLA sees a program, fuses what it likes, orders it, and gives each
# value a place in one block of memory for as long as it lives. It can be asked to write down
# both, places and lives, and these make pictures like a game of Tetris: to the right goes time,
# upwards the address, and a rectangle is one array. Let us have it compile four programs: the
# plain gradient, one with `jax.checkpoint` around each layer, which is the usual way, and two of
# ours.

# %%
jax.config.update("jax_enable_compilation_cache", False)  # a cached program writes nothing down
VALUE = re.compile(r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)")
LIFE = re.compile(r"^ *([\w.\-]+)\{\}:(\d+)-(\d+)", re.MULTILINE)


def assigned(f):
    """The size of XLA's temporary memory; of each array there its life, address and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        lowered = jax.jit(jax.value_and_grad(f)).lower(params, x)
        asked = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        memory = lowered.compile(compiler_options=asked).memory_analysis()
        assert memory is not None
        text = lambda end: "".join(p.read_text() for p in Path(folder).glob(f"*{end}.txt"))
        places, lives = text("-buffer-assignment"), text("-live-range")
    block = next(part for part in places.split("allocation ") if "preallocated-temp" in part)
    life = {name: (int(a), int(b)) for name, a, b in LIFE.findall(lives)}
    arrays = [
        (*life[name], int(offset), int(size))
        for name, size, offset in VALUE.findall(block)
        if name in life
    ]
    return memory.temp_size_in_bytes, arrays


def every_layer(params, x):
    for p in params:
        x = jax.checkpoint(layer)(x, p)
    return jnp.mean(norm(x) ** 2)


programs = {
    "jax.grad": loss,
    "jax.checkpoint, each layer": every_layer,
    "remat, all": xf.remat(loss),
    "remat, 10.5 MB": xf.remat(loss, budget=10_500_000),
}
games = {name: assigned(f) for name, f in programs.items()}

_, panels = plt.subplots(1, 4, figsize=(12, 3.6), sharey=True)
for ax, (name, (size, arrays)) in zip(panels, games.items(), strict=True):
    start, end = min(a for a, *_ in arrays), max(b for _, b, *_ in arrays)
    for born, dies, offset, bytes_ in arrays:
        at, width = 100 * (born - start) / (end - start), 100 * (dies - born) / (end - start)
        colour = BLUE if bytes_ == WIDE else ORANGE
        box = Rectangle((at, offset / 1e6), width, bytes_ / 1e6, facecolor=colour)
        box.set(edgecolor="white", linewidth=0.3)
        ax.add_patch(box)
    ax.set_title(f"{name}: {size / 1e6:.1f} MB", size=9)
    ax.set(xlabel="operations done (%)", xlim=(0, 100), ylim=(0, 45))
panels[0].set_ylabel("address (MB)")
plt.show()

# %% [markdown]
# Blue are the wide arrays. On the left is what `jax.grad` leaves to a compiler: long lives, since
# everything that a derivative might want is kept. In the third picture no product runs twice
# either, and yet less than half of the memory is enough: that is the cut without a price, which
# every program can have for nothing. In the second and the last the mountain is gone, and the short
# lives on their right are layers run again, one at a time, right before their use. They stay
# there: a compiler that finds the same product computed twice would like to compute it once and
# keep it, and `remat`, like `jax.checkpoint`, writes the order down so that it can't.
#
# ## Memory against work
#
# `jax.checkpoint` is one point. The whole range of budgets is a curve with which to bargain: so
# much memory for so much time.

# %%
whole, least = (report_of(b).peak for b in ("all", 0.0))
sweep = np.linspace(least, whole, 17).astype(int).tolist()
peaks = [report_of(b).peak for b in sweep]
tried = [sweep[0], sweep[2], sweep[4], sweep[8], sweep[12], sweep[16]]
works = [work_of(xf.remat(loss, budget=b)) / plain for b in tried]
got = [assigned(xf.remat(loss, budget=b))[0] for b in tried]

_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
left.plot([0, 22], [0, 22], color=GREY, linestyle=":", label="the budget")
left.plot(np.array(sweep) / 1e6, np.array(peaks) / 1e6, ".-", color=BLUE, label="the plan")
left.plot(np.array(tried) / 1e6, np.array(got) / 1e6, "s", color=ORANGE, label="XLA")
left.set(xlabel="budget (MB)", ylabel="needed (MB)", xlim=(6, 22), ylim=(0, 22))
left.legend(frameon=False)
right.plot(np.array(got) / 1e6, works, "o-", color=BLUE, label="remat, six budgets")
for (name, f), mark in zip(list(programs.items())[:2], "sd", strict=True):
    right.plot(games[name][0] / 1e6, work_of(f) / plain, mark, color=RED, label=name)
right.set(xlabel="needed by XLA (MB)", ylabel="products, relative to jax.grad", xlim=(0, 45))
right.legend(frameon=False)
plt.show()
print("over its budget:", [b for b, n in zip(tried, got, strict=True) if n > b] or "none")

# %% [markdown]
# On the left, what was promised: the compiler stays below the budget, at every point that we
# compiled, and a smaller budget never needs more. On the right, what it costs: nothing at all from
# the plain gradient down to less than half of its memory; then 20 % of work down to a fifth of it,
# which is where `jax.checkpoint` is too; and below that much work for few bytes.
#
# And if it can't be done? Then it is an error at once, with the least that can be done, and the
# lines that need it. A program that runs has kept its promise.

# %%
try:
    jax.grad(xf.remat(loss, budget=3_000_000))(params, x)
except xf.BudgetError as refused:
    print(refused)

# %% [markdown]
# ## What to take home
#
# * A gradient's memory is a mountain, and its summit is what counts.
# * What to keep is a minimum cut between the forward and the backward pass. The best values to
#   keep are often ones that no derivative asks for.
# * Most of what `jax.grad` keeps can be had for nothing; then bytes cost work, at a price that is
#   low in the beginning.
# * Ask for bytes, not for layers: `xf.remat(loss, budget=…)` meets the number or raises, and
#   `xf.remat.report` tells line by line how.
# * `budget` also takes a dict by the names of `jax.named_scope`s; `again=` says what kinds of work
#   may be repeated, and `offload=` what goes to the host's memory instead.
