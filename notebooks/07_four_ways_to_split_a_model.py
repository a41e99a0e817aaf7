# %% [markdown]
# # Four ways to split a model
#
# Eight devices, one model. One may give each device other *rows* of the batch, or other *numbers*
# of each matrix, or other *positions* of the text. Whatever one chooses, the loss and its gradient
# must be those of one device. What differs is what each device holds, what it has to say to the
# others, and whether it can work while it is talking.
#
# None of these questions needs eight GPUs. `describe` reads a layout in words; `parity` compares
# it with one device, on eight virtual ones; and `audit` compiles it for eight H200s that are not
# here and reads from the compiled program who says what to whom, and what is computed meanwhile.

# %%
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.colors import ListedColormap

from xform.sharding import (
    AuditError,
    ParityError,
    TensorParallel,
    audit,
    cpu_devices,
    declare,
    describe,
    make_mesh,
    parity,
)
from xform.sharding.data import gather, per_device
from xform.sharding.fsdp import scan_layers

cpu_devices(8)
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"

# %% [markdown]
# ## The model, once
#
# Four layers: a norm, two products of which one gates the other, and a product back. `tp` says how
# a block opens and closes. With `TensorParallel()`, that is a product and nothing else.


# %%
def layer(x, p, tp):
    n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    up, gate = tp.column(n, p["up"], p["gate"])
    return x + tp.row(jax.nn.gelu(gate) * up, p["down"])


def shapes(layers, width, hidden, rows, length, dtype):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    params = {
        "scale": of(layers, width),
        "up": of(layers, width, hidden),
        "gate": of(layers, width, hidden),
        "down": of(layers, hidden, width),
    }
    return params, {"x": of(rows, length, width), "y": of(rows, length, width)}


@dataclass(frozen=True)
class Way:
    """A way to split it: the mesh, and what of each array a device has."""

    mesh: dict
    weights: dict
    batch: P
    tp: TensorParallel = field(default_factory=TensorParallel)
    gathers: bool = False

    @property
    def specs(self):
        return self.weights, {"x": self.batch, "y": self.batch}


def loss_of(way):
    """The loss, as each device computes it of its parts."""
    over = tuple(axis for axis in way.mesh if axis in str(way.batch))  # where tokens differ

    def loss(params, batch):
        x = batch["x"]
        one = lambda x, p: layer(x, p, way.tp)
        if way.gathers:
            parts = {name: P(*spec[1:]) for name, spec in way.weights.items()}
            whole = lambda p: gather(p, parts, "dp")
            x = scan_layers(one, x, params, gather=whole, ahead=1)
        else:
            used = {k: per_device(p, over) for k, p in params.items()} if over else params
            x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, used)
        total = jnp.sum((x - batch["y"]) ** 2)
        with declare("loss", *over):
            return jax.lax.psum(total, over) if over else total

    return loss


# %% [markdown]
# And here are the four ways. Each is a mesh, a spec for each matrix, one for the batch:
#
# * **data**: `dp` splits the rows of the batch, and everyone has all weights;
# * **fully sharded**: it splits the weights as well, and a layer's are gathered before their use;
# * **tensor**: `tp` splits the matrices of a block, first by columns, then by rows, and everyone
#   has all tokens;
# * **sequence**: the same, and between blocks everyone has some of the positions, in rings that
#   multiply one part while the next arrives.

# %%
whole = dict.fromkeys(("scale", "up", "gate", "down"), P())
dealt = {name: P() if name == "scale" else P(None, "dp") for name in whole}
columns = P(None, None, "tp")
blocks = {"scale": P(), "up": columns, "gate": columns, "down": P(None, "tp")}
ring = TensorParallel("tp", sequence=True, overlap="ring")
ways = {
    "data": Way({"dp": 8}, whole, P("dp")),
    "fully sharded": Way({"dp": 8}, dealt, P("dp"), gathers=True),
    "tensor": Way({"tp": 8}, blocks, P(), TensorParallel("tp")),
    "sequence": Way({"tp": 8}, blocks, P(None, "tp"), ring),
}
large = shapes(4, 4096, 16384, 8, 4096, jnp.bfloat16)
CYCLE = plt.rcParams["axes.prop_cycle"].by_key()["color"]
PALETTE = ListedColormap(["0.88", *CYCLE[:8]])

_, panels = plt.subplots(4, 3, figsize=(9, 7))
titles = {"up": "up [width, hidden]", "down": "down [hidden, width]", "x": "x [rows, positions]"}
for row, (name, way) in zip(panels, ways.items(), strict=True):
    mesh = make_mesh(**way.mesh)
    for ax, (what, title) in zip(row, titles.items(), strict=True):
        spec = way.batch if what == "x" else P(*way.weights[what][1:])
        picture = np.zeros((64, 64))
        owners = NamedSharding(mesh, spec).devices_indices_map((64, 64))
        if len({str(place) for place in owners.values()}) == 8:
            for number, place in enumerate(owners.values()):
                picture[place] = number + 1
        ax.imshow(picture, cmap=PALETTE, vmin=0, vmax=8, aspect="auto", interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        if ax in panels[0]:
            ax.set_title(title, size=9)
        if not picture.any():
            ax.text(32, 32, "all, on each", ha="center", va="center", color="0.35", size=9)
    row[0].set_ylabel(name)
plt.show()

# %% [markdown]
# A colour is a device; grey is on all of them. What follows from a picture for the gradients is
# less easy to see, and `describe` says it. Compare the last column of these two:

# %%
for name in ("fully sharded", "sequence"):
    way = ways[name]
    told = describe(
        make_mesh(**way.mesh), large[0], way.weights, rows=(8, 4096), tokens=way.batch,
        stream=way.batch,
    )  # fmt: skip
    print(name + ",", "\n".join(str(told).splitlines()[:6]), end="\n\n")

# %% [markdown]
# A matrix that `dp` splits has a gradient that is summed over all devices, of which each gets its
# part (*dealt out*). One that `tp` splits has its gradient where it is: nobody else has seen these
# columns. And the scale of the norm, which all have, has seen only some positions on each device,
# so that its gradient is a sum over `tp`. Forget that, and nothing fails: the model merely trains
# worse.
#
# ## The same numbers
#
# Which is why one compares. `parity` runs loss and gradients on the mesh and on one device, in
# float64, where a different order of sums makes 10⁻¹⁵ and the smallest mistake stands out.

# %%
rng = np.random.default_rng(0)
draw = lambda s: rng.normal(size=s.shape) / s.shape[-2] ** 0.5
small = jax.tree.map(draw, shapes(2, 16, 32, 8, 8, np.float64))
fast = {"xla_backend_optimization_level": 0}
for name, way in ways.items():
    mesh = make_mesh(**way.mesh)
    found = parity(loss_of(way), mesh, way.specs, compiler_options=fast)(*small)
    print(f"{name:14} largest error {max(leaf.error for leaf in found.leaves):.0e}")

# %% [markdown]
# The classic mistake is a sum over devices that all have the same already. JAX's types would
# refuse it; with a cast they are told that it is meant. The loss is then eight times too large,
# and an optimiser that divides by the size of gradients never shows it:

# %%
tensor = ways["tensor"]


def eightfold(params, batch):
    with declare("loss", "tp"):
        return jax.lax.psum(jax.lax.pcast(loss_of(tensor)(params, batch), "tp", to="varying"), "tp")


alone = lambda params, batch: loss_of(Way({}, whole, P()))(params, batch)
try:
    parity(
        eightfold, make_mesh(tp=8), tensor.specs, reference=alone, compiler_options=fast
    )(*small)  # fmt: skip
except ParityError as wrong:
    print(wrong)

# %% [markdown]
# ## What is said
#
# Now the size of a real model: matrices of 4096 × 16384 in bfloat16, 4096 tokens in each of eight
# rows. `audit` compiles the gradient for eight H200s and reads the result. Each collective has the
# rule that declared it, its axes, its bytes and its line; what nobody declared is an error, since
# it was put there by a mistake, or by the compiler.


# %%
def gradient(way):
    def step(params, batch):
        loss = jax.shard_map(loss_of(way), in_specs=way.specs, out_specs=P())
        return jax.grad(loss)(params, batch)

    return step


reports = {
    name: audit(gradient(way), large, way.mesh, specs=way.specs, strict=False)
    for name, way in ways.items()
}
print(reports["tensor"])

# %% [markdown]
# Two all-reduces a layer, one where a block closes and one on the way back where it opens, and two
# offenders: the batch is held whole by every device, which is what this way means. (One says so by
# `replicated=("1/*",)`, and then it is no offence. With `strict`, the default, offences raise.)
# Here are all four, side by side:

# %%
_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
at = np.arange(len(reports))
low = np.zeros(len(reports))
for part, colour in (("arguments", BLUE), ("results", GREEN), ("temporaries", ORANGE)):
    size = np.array([r.memory[part] for r in reports.values()]) / 1e9
    left.barh(at, size, left=low, color=colour, label=part)
    low += size
left.set(xlabel="memory of a device (GB)", xlim=(0, 1.45 * low.max()))
low = np.zeros(len(reports))
for covered, colour in ((True, BLUE), (False, RED)):
    sent = [
        sum(m.sent * m.trips for m in r.messages if m.covered == covered) for r in reports.values()
    ]
    label = "while a product runs" if covered else "while nothing else runs"
    right.barh(at, np.array(sent) / 1e9, left=low, color=colour, label=label)
    low += np.array(sent) / 1e9
right.set(xlabel="sent by a device (GB)", xlim=(0, 1.9 * low.max()))
for ax in (left, right):
    ax.set_yticks(at, reports)
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="center right", fontsize=8)
plt.show()

# %% [markdown]
# * **data** holds all weights and all gradients on every device, and says one thing, at the end:
#   its gradients. Nothing is left to hide them behind.
# * **fully sharded** says half as much again, each weight twice on the way out and its gradient
#   once on the way back, and holds an eighth; most of it hides behind products, a layer ahead.
# * **tensor** doesn't speak of weights at all but of activations, and holds all of these. Half of
#   what it says comes in the middle of things, where the next product can't begin without it.
# * **sequence** sends a quarter more than that, but in pieces, one for each product of a piece.
#
# ## Overlap, seen
#
# "May overlap" is a hope. What a compiled program does is written in it: a message has a start and
# an end, and between these there is a product, or there isn't. Rules promise it (`hidden`), and
# the audit holds the program to the promise:

# %%
for name, report in reports.items():
    broken = [offender for offender in report.offenders if offender.kind == "exposed"]
    asked = lambda m: any(m.op in d.hidden for d in m.promises)
    promised = [m for m in report.messages if asked(m)]
    covered = sum(m.covered for m in promised)
    print(f"{name:14} promised to be hidden {len(promised):2}, hidden {covered:2}")
    for offender in broken:
        print("    exposed:", offender.text)

# %% [markdown]
# Where a promise is not kept it is said, message by message; a call without `strict=False` would
# have raised. Nobody has to look at a profile to learn that a message which was to be hidden isn't.
#
# ## What nobody declared
#
# One more thing that goes wrong without a word. Here the batch is split by positions where the
# function wants it by rows. JAX can do that: it moves the data. The audit finds a message in the
# compiled program that no rule has asked for:

# %%
mesh = make_mesh(dp=8)


def meant_for_rows(params, batch):
    rows = jax.tree.map(lambda x: jax.sharding.reshard(x, P("dp")), batch)
    return gradient(ways["data"])(params, rows)


specs = whole, {"x": P(None, "dp"), "y": P(None, "dp")}
try:
    audit(meant_for_rows, large, {"dp": 8}, specs=specs, replicated=("0/*",))
except AuditError as wrong:
    print(wrong)

# %% [markdown]
# ## What to take home
#
# * A split is a spec for each array. What is summed where follows from it, and `describe` says it.
# * Loss curves don't show a sum too many or too few. `parity` does, by name and factor.
# * Bytes decide less than *when* they are sent. A split that sends more may wait less.
# * Communication is part of a program's contract: declare it, and have the compiled program
#   checked, for as many devices as you wish you had.
