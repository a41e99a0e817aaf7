# %% [markdown]
# # Attention as a program
#
# Attention compares every query with every key, and takes a mean of the values weighted by how
# well they match. Everything that people have invented since is a change to one of two places in
# it: **which pairs may meet**, and **what happens to their score**. Written down as arrays,
# either is a number for every pair, and a million pairs of a thousand tokens are only the
# beginning. Written down as *functions* of a pair's two indices they are a line of Python each.
#
# This notebook treats them as functions. We draw eight masks, learn a bias by gradient descent,
# send messages along the bonds of a molecule, and take the noise out of a picture. All of it is
# one operation, `flex_attention`, with other functions inside.

# %%
import textwrap
import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.colors import LogNorm

import xform
from xform import causal, documents, flex_attention, prefix, sliding_window
from xform.primitives.masks import (
    as_mask,
    bigbird,
    full,
    global_tokens,
    graph,
    neighborhood,
    strided,
    tiled,
)
from xform.primitives.scores import alibi, relative_bias, softcap

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE = "#2d6a8e", "#f2a65a"

# %% [markdown]
# ## Two places for a function
#
# Here is attention, written as an array program. `q` is `[batch, queries, heads, size]`, `k` and
# `v` likewise with keys; `score` and `mask` are functions of scalars (the score, and which batch
# entry, head, query and key it belongs to), and `vmap` spreads them over all pairs.


# %%
@partial(jax.jit, static_argnames=("score", "mask"))
def dense(q, k, v, score, mask):
    """Attention that holds a number for every pair."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    at = jnp.meshgrid(*map(jnp.arange, s.shape), indexing="ij")
    s = jnp.where(jnp.vectorize(mask)(*at), jnp.vectorize(score)(s, *at), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)


q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 300, 4, 32))
near = lambda b, h, i, j: (i - j >= 0) & (i - j < 8 * 2**h)  # a window that depends on the head
fading = lambda s, b, h, i, j: s - 0.1 * (h + 1) * (i - j)

out = flex_attention(q, k, v, score_mod=fading, mask_mod=near)
print(
    "largest difference to the dense program:",
    f"{jnp.abs(out - dense(q, k, v, fading, near)).max():.0e}",
)

# %% [markdown]
# Same functions, same numbers. The difference is that `flex_attention` never holds the array of
# pairs. It is traced, as in *From Python to jaxprs*: `near` and `fading` become jaxprs, and the
# loop over tiles of queries and keys runs them inside. What a call needs at once can be told
# without running it, from shapes alone:

# %%
lengths = [2**n for n in range(10, 17, 2)]
q_of = lambda t: jax.ShapeDtypeStruct((1, t, 8, 64), jnp.float32)
loss = lambda attend: lambda q, k, v: attend(q, k, v, fading, near).sum()
flex = lambda q, k, v, score, mask: flex_attention(q, k, v, score_mod=score, mask_mod=mask)
peak = {
    name: [xform.memory(jax.grad(loss(f), (0, 1, 2)))(*[q_of(t)] * 3).peak / 1e6 for t in lengths]
    for name, f in {"dense": dense, "flex_attention": flex}.items()
}

_, ax = plt.subplots(figsize=(6, 3.4))
for (name, megabytes), colour in zip(peak.items(), (ORANGE, BLUE), strict=True):
    ax.loglog(lengths, megabytes, "o-", color=colour, label=name, base=2)
ax.axhline(141e3, color="0.6", linestyle=":")
ax.text(lengths[0], 160e3, "the memory of an H200", color="0.4", size=8)
ax.set(
    xlabel="length (tokens)", ylabel="peak memory (MB)", title="Forward and backward, 8 heads of 64"
)
ax.set_xticks(lengths, [f"{t // 1024}k" for t in lengths])
ax.set_yticks([10**n for n in range(2, 7)], [f"{10**n:,}" for n in range(2, 7)])
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Eight masks
#
# Masks of the field are values. They combine with `&`, `|` and `~`, with each other and with any
# function, and they print as they were written, so that the titles below are simply what Python
# says of them. The last one is nobody's: a token sees those whose index differs from its own in
# one bit. That is the graph of a hypercube: each of `T` tokens sees `log2(T)` others, and after
# `log2(T)` layers everyone has heard of everyone.

# %%
ids = jnp.repeat(jnp.arange(4), jnp.array([9, 20, 5, 14]))


def hypercube(b, h, i, j):
    different = i ^ j
    return different & (different - 1) == 0  # at most one bit is set


gallery = [
    causal(),
    sliding_window(12),
    causal() & documents(ids),
    prefix(14) | causal(),
    strided(7),
    global_tokens(3) | sliding_window(5, right=4),
    bigbird(jax.random.key(1), 48, block=4, random=1),
    causal() & as_mask(hypercube),
]


def pairs(mask, n=48, **at):
    """The mask as a picture: one pixel for each pair."""
    i, j = jnp.arange(n)[:, None], jnp.arange(n)[None]
    see = jax.jit(lambda i, j: mask(at.get("b", 0), at.get("h", 0), i, j))
    return jnp.broadcast_to(see(i, j), (n, n))


_, panels = plt.subplots(2, 4, figsize=(11, 6), sharex=True, sharey=True)
for ax, mask in zip(panels.flat, gallery, strict=True):
    ax.imshow(pairs(mask), cmap="Blues", vmax=1.4)
    ax.set_title(textwrap.fill(repr(mask), 30), size=8, family="monospace")
for ax in panels[-1]:
    ax.set_xlabel("key (index)")
for ax in panels[:, 0]:
    ax.set_ylabel("query (index)")
plt.show()

# %% [markdown]
# A processor doesn't work pair by pair. It takes tiles, here of 128 queries and 128 keys, and a
# mask decides about each: an **empty** tile is skipped, a **full** one is computed without asking
# the mask, a **partial** one asks it. `show` tells which are which, and with it what a mask
# saves. xform finds out inside of `jit`, by running the mask on intervals of indices and not on
# indices; nobody builds a block map by hand.

# %%
packed = jnp.repeat(jnp.arange(5), jnp.array([300, 700, 120, 500, 428]))
sparse = causal() & (sliding_window(256) | global_tokens(4)) & documents(packed)
view = sparse.show(2048)
view

# %% [markdown]
# Is that so, in seconds? The fewer tiles, the shorter; the line is what would be perfect.

# %% tags=["measured"]
q, k, v = jax.random.normal(jax.random.key(2), (3, 1, 2048, 4, 64))
timed = {
    "all pairs": (full(), 1.0),
    "causal": (causal(), causal().show(2048).live),
    "the mask above": (sparse, view.live),
}


def compiled(mask):
    return jax.jit(lambda q, k, v: flex_attention(q, k, v, mask_mod=mask))


programs = {name: compiled(mask) for name, (mask, _) in timed.items()}
turns = {name: [] for name in programs}
for _ in range(8):  # one after the other, so that a busy moment is one of all
    for name, program in programs.items():
        start = time.perf_counter()
        program(q, k, v).block_until_ready()
        turns[name].append(1e3 * (time.perf_counter() - start))
taken = {name: min(milliseconds[1:]) for name, milliseconds in turns.items()}
_, ax = plt.subplots(figsize=(6, 3.4))
for name, (_, share) in timed.items():
    ax.plot(share, taken[name], "o", color=BLUE)
    ax.annotate(name, (share, taken[name]), xytext=(8, -4), textcoords="offset points", size=8)
ax.plot([0, 1], [0, taken["all pairs"]], color="0.7", zorder=0)
ax.set(xlabel="tiles that run (share of all)", ylabel="time (ms)", xlim=(0, 1.15), ylim=(0, None))
ax.set_title("2,048 tokens, 4 heads of 64, on a CPU", size=10)
plt.show()

# %% [markdown]
# ## A score is a function too
#
# A score mod gets the scaled product `q·k` and where it stands, and returns another score. Chain
# them with `>>`, in the order in which they are meant. To *see* one, let the values be the
# identity matrix: then the output is the weights themselves.


# %%
def weights(score=None, mask=None, n=128, heads=4, size=16):
    """What each query takes from each key, `[queries, heads, keys]`."""
    q, k = jax.random.normal(jax.random.key(3), (2, 1, n, heads, size))
    one = jnp.broadcast_to(jnp.eye(n)[None, :, None], (1, n, heads, n))
    return flex_attention(q, k, one, score_mod=score, mask_mod=mask)[0]


week = lambda s, b, h, i, j: s + 2.0 * jnp.cos(2 * jnp.pi * (i - j) / 7)  # daily data
scores = {
    "none": None,
    "alibi.of(4)": alibi.of(4),
    "softcap(0.5)": softcap(0.5),
    "week": week,
    "softcap(1.0) >> week": softcap(1.0) >> week,
}
_, panels = plt.subplots(1, len(scores), figsize=(12, 3), sharey=True)
for ax, (name, score) in zip(panels, scores.items(), strict=True):
    ax.imshow(
        weights(score, causal())[64:, 0, 64:] ** 0.5,
        cmap="Blues",
        vmin=0,
        vmax=0.4,
        extent=(64, 128, 128, 64),
    )
    ax.set_title(name, size=9, family="monospace")
    ax.set_xlabel("key (index)")
panels[0].set_ylabel("query (index)")
plt.colorbar(
    panels[-1].images[0], ax=panels, label="square root of the weight (no unit)", shrink=0.8
)
plt.show()

# %% [markdown]
# ## Gradients of what a score reads
#
# A score may read arrays: slopes, tables, distances, anything. They are parameters like any
# others, and their gradients are exact, although nothing of the size of all pairs is ever kept.
# We can test that honestly: take a teacher whose two heads prefer certain distances, show a
# student nothing but inputs and outputs, and see whether it finds the teacher's table.
#
# One thing can't be found. Softmax doesn't see a constant that is added to all scores, so that a
# table is known up to one number for each head; we compare without it.

# %%
reach = 20
distance = jnp.arange(-reach, reach + 1)
teacher = jnp.stack(
    [
        3.0 * jnp.exp(-((distance + 9) ** 2) / 8) + 2.0 * jnp.exp(-((distance - 6) ** 2) / 30),
        jnp.cos(2 * jnp.pi * distance / 10) - 0.08 * jnp.abs(distance),
    ]
)
q, k, v = jax.random.normal(jax.random.key(4), (3, 4, 256, 2, 16))


def attend(table):
    return flex_attention(q, k, v, score_mod=relative_bias(table))


lessons = attend(teacher)


def error(table):
    return jnp.mean((attend(table) - lessons) ** 2)


optimizer = optax.adam(0.1)
table = jnp.zeros_like(teacher)


@jax.jit
def step(carry, _):
    table, state = carry
    value, gradient = jax.value_and_grad(error)(table)
    updates, state = optimizer.update(gradient, state)
    return (optax.apply_updates(table, updates), state), value


(learned, _), errors = jax.lax.scan(step, (table, optimizer.init(table)), length=150)
centred = lambda x: x - x.mean(-1, keepdims=True)
print(f"mean square error {errors[0]:.1e} → {errors[-1]:.1e}")

# %%
_, panels = plt.subplots(1, 3, figsize=(11, 3.1), width_ratios=(1, 1.2, 1.2))
panels[0].semilogy(errors, color=BLUE)
panels[0].set(xlabel="step (count)", ylabel="mean square error (no unit)")
for head, ax in enumerate(panels[1:]):
    ax.plot(distance, centred(teacher)[head], color=ORANGE, linewidth=5, alpha=0.7, label="teacher")
    ax.plot(distance, centred(learned)[head], color=BLUE, label="learned")
    ax.set(xlabel="key - query (tokens)", ylabel="bias (nats)", title=f"head {head}")
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# The gradient of a table entry is a sum over all pairs at that distance, in all sequences. Second
# derivatives are there as well: along the line from nothing to the teacher, here is the curvature
# of the error, beside what a finite difference makes of its slope.

# %%
slope = lambda t: jax.jvp(error, (t * teacher,), (teacher,))[1]
slopes, curvature = jax.jit(jax.vmap(jax.value_and_grad(slope)))(jnp.array([0.45, 0.5, 0.55]))
print(f"by autodiff   {curvature[1]:.2e}")
print(f"by difference {(slopes[2] - slopes[0]) / 0.1:.2e}")

# %% [markdown]
# ## A molecule
#
# Whom does an atom see? The atoms that it is bound to. So a molecule is a mask, and a graph
# neural network is attention under it. This is caffeine, its 14 atoms without hydrogen and its 15
# bonds.

# %%
# fmt: off
atoms = ["C", "N", "C", "N", "C", "C", "C", "O", "N", "C", "O", "N", "C", "C"]
bonds = [
    (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 1), (5, 6), (6, 7), (6, 8), (8, 9), (9, 10),
    (9, 11), (11, 4), (11, 12), (8, 13),
]
place = np.array([
    (2.13, 1.76), (1.82, 0.81), (2.41, 0), (1.82, -0.81), (0.87, -0.5), (0.87, 0.5), (0, 1), (0, 2),
    (-0.87, 0.5), (-0.87, -0.5), (-1.73, -1), (0, -1), (0, -2), (-1.73, 1),
])
# fmt: on
PAINT = {"C": "0.25", "N": "#2d6a8e", "O": "#b5332e"}


def sketch(ax, fill, **options):
    """The molecule, its atoms filled by a colour or by a number each."""
    for a, b in bonds:
        ax.plot(*place[[a, b]].T, color="0.6", linewidth=2, zorder=1)
    shown = ax.scatter(*place.T, c=fill, s=230, zorder=2, edgecolor="0.3", **options)
    ax.set(aspect="equal", xlim=(-2.3, 3), ylim=(-2.6, 2.6))
    ax.set_axis_off()
    return shown


edges = jnp.array([*bonds, *((b, a) for a, b in bonds)])
bonded = graph.from_edges(edges[:, 0], edges[:, 1], nodes=14)
molecule = bonded | sliding_window(1)  # the atom itself, too

_, (ax, matrix) = plt.subplots(1, 2, figsize=(8.4, 3.6))
sketch(ax, [PAINT[a] for a in atoms])
for (x, y), a in zip(place, atoms, strict=True):
    ax.text(x, y, a, color="white", ha="center", va="center", size=9, weight="bold")
ax.set_title("caffeine", size=10)
matrix.imshow(pairs(molecule, 14), cmap="Blues", vmax=1.4)
matrix.set_xticks(range(14), atoms)
matrix.set_yticks(range(14), atoms)
matrix.set(xlabel="key (atom)", ylabel="query (atom)", title="")
matrix.set_title(repr(molecule), size=9, family="monospace")
plt.show()

# %% [markdown]
# What a layer of attention under this mask can't do is to hear from further away than one bond.
# So after `n` layers an atom knows of those within `n` bonds and of no others, exactly: what a
# mask hides has no influence at all, not a small one. The derivative of an atom's state by that
# of an oxygen shows it; atoms where it is exactly 0 are the colour of sand.

# %%
x = jax.random.normal(jax.random.key(5), (1, 14, 1, 8))


def layers(x, count):
    """The states after each of so many layers, `[layer, 1, atom, 1, size]`."""

    def layer(x, _):
        x = (x + flex_attention(x, x, x, mask_mod=molecule)) / 2
        return x, x

    return jax.lax.scan(layer, x, length=count)[1]


@jax.jit
def influence(source):
    """How much each atom's state moves with that of one atom, `[layer, atom]`."""
    states = lambda s: layers(x.at[0, source, 0].set(s), 6)[:, 0, :, 0]
    return jnp.linalg.norm(jax.jacfwd(states)(x[0, source, 0]), axis=(2, 3))


scale = LogNorm(1e-7, 1)
colours = plt.get_cmap("Blues").with_extremes(bad="#f2d9c0")
felt_by_layer = influence(7)
_, panels = plt.subplots(1, 4, figsize=(12, 3.2))
for ax, n in zip(panels, (1, 2, 4, 6), strict=True):
    felt = felt_by_layer[n - 1]
    sketch(ax, np.where(felt > 0, felt, np.nan), cmap=colours, norm=scale, plotnonfinite=True)
    ax.scatter(*place[7], s=420, facecolor="none", edgecolor="#b5332e", linewidth=2)
    ax.set_title(f"{n} layer{'s' * (n > 1)}: {int((felt > 0).sum())} atoms", size=10)
plt.colorbar(
    panels[-1].collections[0],
    ax=panels,
    label="|∂ state / ∂ state of the oxygen| (no unit)",
    shrink=0.8,
)
plt.show()

# %% [markdown]
# Molecules have different sizes, and a batch has one. Edges of -1 are padding; an atom without
# any edge sees nothing, and attention over nothing is 0 with a gradient of 0: no NaN to be masked
# away afterwards. Below, caffeine and ethanol (C–C–O) in one batch, with a number for each kind
# of bond, learned like any other. Only pairs that are bonds have a gradient.

# %%
ethanol = jnp.pad(
    jnp.array([(0, 1), (1, 0), (1, 2), (2, 1)]), ((0, len(edges) - 4), (0, 0)), constant_values=-1
)
both = jnp.stack([edges, ethanol])
batch = graph.from_edges(both[..., 0], both[..., 1], nodes=14)
states = jax.random.normal(jax.random.key(6), (2, 14, 1, 8))
bias = jnp.zeros((2, 1, 14, 14))  # [molecule, head, atom, atom]


def energy(bias):
    add = lambda s, b, h, i, j: s + bias[b, h, i, j]
    out = flex_attention(states, states, states, score_mod=add, mask_mod=batch)
    return jnp.sum(out**2), out


gradient, out = map(np.asarray, jax.jit(jax.grad(energy, has_aux=True))(bias))
print("output of ethanol's three atoms:", np.linalg.norm(out[1, :3, 0], axis=-1).round(2))
print("and of what is padding:         ", np.linalg.norm(out[1, 3:, 0], axis=-1).max())
felt = np.abs(gradient[:, 0]) > 1e-5  # beyond the rounding of float32
print("pairs with a gradient:", felt.sum((1, 2)), "of 2 × 15 and 2 × 2 bonds")
joined = np.stack([pairs(batch, 14, b=b) for b in range(2)])
print("largest gradient off the bonds:", np.abs(np.where(joined, 0, gradient[:, 0])).max())

# %% [markdown]
# Of ethanol, only the atom in the middle has a gradient: those at the ends see one atom each,
# whose weight is 1 whatever its score. The same holds for the five tips of caffeine, which leaves
# 25 of 30.
#
# ## A picture
#
# Here is a filter from before attention was called attention. *Non-local means* (Buades, Coll and
# Morel, 2005) takes the noise out of a picture by replacing each pixel with a mean over the
# pixels around it, weighted by how alike the *patches* around them look: $w_{ij} \propto
# \exp(-\lVert p_i - p_j \rVert^2 / 2h^2)$. Queries and keys are patches, values are pixels, and
# since $\lVert p_i - p_j\rVert^2 = \lVert p_i\rVert^2 - 2 p_i p_j + \lVert p_j\rVert^2$, of which
# softmax drops what belongs to the query alone, the score is a product and one number for each
# key. "The pixels around it" is a mask on a grid of two dimensions.

# %%
side, window = 80, 13
order = tiled((side, side), (8, 16))  # of the pixels
back = jnp.argsort(order)


def clean_picture(turns):
    """Rings, stripes and a disc."""
    y, x = jnp.meshgrid(*[jnp.linspace(-1, 1, side)] * 2, indexing="ij")
    rings = jnp.sign(jnp.sin(turns * jnp.hypot(x + 0.3, y)))
    stripes = jnp.sign(jnp.sin(turns * (x + y)))
    disc = jnp.hypot(x - 0.35, y - 0.35) < 0.45
    return 0.5 + 0.5 * jnp.where(disc, stripes, 0.6 * rings)


@partial(jax.jit, static_argnames="size")
def patches(picture, size=5):
    """The surroundings of each pixel, `[1, pixels, 1, size * size]`."""
    wide = jnp.pad(picture, size // 2, mode="reflect")
    shifted = [wide[i : i + side, j : j + side] for i in range(size) for j in range(size)]
    return jnp.stack(shifted, -1).reshape(1, side * side, 1, size * size)


def denoise(noisy, width, mask):
    p, pixels = patches(noisy)[:, order], noisy.reshape(1, -1, 1, 1)[:, order]
    scale = 1 / (p.shape[-1] * width**2)
    square = jnp.sum(p**2, -1)[0, :, 0]
    alike = lambda s, b, h, i, j: s - 0.5 * scale * square[j]
    out = flex_attention(p, p, pixels, scale=scale, score_mod=alike, mask_mod=mask)
    return out[:, back].reshape(side, side)


around = neighborhood((side, side), window, order=order) & (lambda b, h, i, j: i != j)
noise = 0.25 * jax.random.normal(jax.random.key(7), (2, side, side))
lesson, exam = (clean_picture(turns) for turns in (10.0, 13.0))

# %% [markdown]
# Two things about `around`. A pixel may not look at itself: of all patches its own is the most
# alike, noise and all. And `order` decides in which order the pixels come. In rows, the lines of
# a neighborhood lie a whole row apart, so that it touches many tiles of 128 pixels and fills few.
# Patch by patch, a tile of the sequence *is* a patch. The mask means the same pixels, and the
# larger the picture, the fewer tiles meet it. Here are both, for a picture of 128 × 128:

# %%
_, panels = plt.subplots(1, 2, figsize=(9, 5))
patchwise = tiled((128, 128), (8, 16))
for ax, how in zip(panels, (None, patchwise), strict=True):
    view = neighborhood((128, 128), window, order=how).show(128 * 128)
    view.plot(ax)
    name = "row by row" if how is None else "in patches of 8 × 16"
    ax.set_title(
        f"{name}: {view.live:.1%} of the tiles run\nfor {view.density:.1%} of the pairs", size=10
    )
    ax.set(xlabel="key (index)", ylabel="query (index)", xticks=range(0, 16385, 4096))
plt.show()

# %% [markdown]
# How wide should `h` be? In 2005 it was tuned by hand. It is a number that a score reads, so it
# has a gradient: learn it on one picture, where the clean one is known, and keep it for another.

# %%
seen = lesson + noise[0]
psnr = lambda picture, truth: -10 * jnp.log10(jnp.mean((picture - truth) ** 2))


@jax.jit
def climb(log_width, _):
    quality = lambda x: psnr(denoise(seen, jnp.exp(x), around), lesson)
    value, gradient = jax.value_and_grad(quality)(log_width)
    return log_width + 0.06 * gradient, (jnp.exp(log_width), value)


_, (widths, qualities) = jax.lax.scan(climb, jnp.log(0.5), length=8)
print(f"h {widths[0]:.2f} → {widths[-1]:.3f}, PSNR {qualities[0]:.1f} → {qualities[-1]:.1f} dB")

# %%
noisy = exam + noise[1]
restored = jax.jit(denoise)(noisy, widths[-1], around)
pictures = {
    "clean": exam,
    "noisy": noisy,
    "mean of 3 × 3": patches(noisy, 3).mean(-1).reshape(side, side),
    "attention, h learned": restored,
}
_, panels = plt.subplots(1, 4, figsize=(12, 3.6), sharey=True)
for ax, (name, picture) in zip(panels, pictures.items(), strict=True):
    quality = "" if name == "clean" else f"\nPSNR {psnr(picture, exam):.1f} dB"
    ax.imshow(picture, cmap="gray", vmin=-0.2, vmax=1.2)
    ax.set(title=name + quality, xlabel="x (pixels)")
panels[0].set_ylabel("y (pixels)")
plt.show()

# %% [markdown]
# A mean of 3 × 3 pixels is attention too, of which every score is the same. What made the
# difference is one line, `alike`, and one learned number in it.
#
# ## Where it says no
#
# A function inside an operation has rules. It is traced once for all pairs, so that it can't
# branch in Python on a score; and arrays that it reads have to fit. Both are said before anything
# runs, with the line and a cure:

# %%
try:
    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s if i >= j else -s)
except TypeError as refused:
    print(refused)
try:
    flex_attention(q, k, v, mask_mod=causal() & documents(ids))
except ValueError as refused:
    print("\n" + str(refused))

# %% [markdown]
# ## Your own
#
# A mask with numbers in it that you want to name, print and reuse is a class of a few lines. Its
# arrays are leaves of a pytree, so that they may be traced, and scanned over layer by layer.

# %%
from dataclasses import field

from jax.typing import ArrayLike

from xform.primitives.masks import Mask, variant


@variant
class cone(Mask):
    """A query sees the last `size` keys, and of those before it the more thinly the further."""

    size: ArrayLike
    base: int = field(default=2, kw_only=True)

    def __call__(self, b, h, q_idx, kv_idx):
        back = q_idx - kv_idx
        level = jnp.maximum(0, jnp.floor(jnp.log(back / self.size + 1e-6) / jnp.log(self.base)))
        return (back >= 0) & (kv_idx % (self.base**level) == 0)


(cone(64) & documents(packed)).show(2048)

# %% [markdown]
# To train a language model on it, copy the imports and the class into `examples/llama.py`, above
# the line `MASK = causal()`, and make that `MASK = cone(64)`. Then run, in the folder of the
# repository,
#
# ```sh
# python3 -m venv .uv && .uv/bin/pip install -q uv && .uv/bin/uv run --extra train examples/train.py
# ```
#
# which trains on the source of Python's standard library, and draws its curves as it goes.
# Nothing else changes: not the backward pass, not the mesh of devices, not the memory.
