# %% [markdown]
# # Write your own pipeline schedule
#
# A model that is too large for one device can be cut across: the first layers here, the next ones
# there. Each device then waits for the one before it on the way forward, and for the one after it
# on the way back. To keep all of them busy, the batch is cut too, into *microbatches* that follow
# one another like workpieces on an assembly line. Who does what in which order is the **schedule**,
# and since 2018 there has been a paper about a better one every year.
#
# In most systems a schedule is a thousand lines of code, with sends and receives in them, and a
# mistake in it hangs a thousand devices. Here it is a table that one writes down. A verifier
# proves it right or names the cell that is wrong; a simulator times and draws it; and the same
# table runs, with the gradients of one device. We shall write one that holds half of what 1F1B
# holds, in less time, in twenty lines.

# %%
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P
from matplotlib.patches import Rectangle

from xform.sharding import cpu_devices, make_mesh, settle, shardings
from xform.sharding.pipeline import (
    Action,
    Schedule,
    ScheduleError,
    Times,
    by_rank,
    by_stage,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    one_program,
    simulate,
    table,
    verify,
    zb_h1,
    zb_v,
)

cpu_devices(8)
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"

# %% [markdown]
# ## A table
#
# Each device (*rank*) owns a slice of the model (*stage*). `F2` is its forward pass on microbatch
# 2, `B2` the backward pass. A line is a rank, and says what it does in which order. When it does
# so follows: an action begins once the rank is free and what it needs has arrived.

# %%
simple = Schedule.from_text(
    """
    F0 F1 F2 F3 B0 B1 B2 B3   # all forward, then all backward
    F0 F1 F2 F3 B0 B1 B2 B3
    F0 F1 F2 F3 B0 B1 B2 B3
    """,
    name="by hand",
)
print(simple.show())
print(verify(simple))

# %% [markdown]
# This is GPipe (Huang et al., 2018). A backward pass takes twice the time of a forward pass, since
# it makes two gradients. The dots are the *bubble*, time in which a rank waits: at the beginning
# until the first microbatch has come down the line, and again at the end. And the proof says
# something else: each rank holds four microbatches at once, whose activations it needs for the way
# back. With more microbatches the bubble is a smaller share, but all of them are held.
#
# ## What can be wrong
#
# A schedule is right if each stage does each microbatch's work exactly once, nothing runs before
# what it needs, and no ranks wait for each other in a circle. Then nothing can hang, however slow
# a rank or a message may be. Three ways to break it, and what the verifier says:

# %%
broken = {
    "a backward pass too early": "F0 B0 F1 B1\nB0 F0 F1 B1",
    "one forgotten, one twice": "F0 F1 B0 B1\nF0 B0 F1 F1",
    "each waits for the other": "F0 B0 F1 B1\nF1 B1 F0 B0",
}
for what, text in broken.items():
    try:
        verify(Schedule.from_text(text, name=what))
    except ScheduleError as wrong:
        print(wrong, end="\n\n")

# %% [markdown]
# The last one is the treacherous kind. Each row for itself is in a good order; rank 0 waits for
# the gradient of microbatch 0, which rank 1 will make after microbatch 1, which waits for rank 0.
# On a cluster it is a job that prints nothing until a time-out ends it. Here it is two cells.
#
# The verifier can hold memory to account as well: `limit=` is how much a rank may hold.

# %%
try:
    verify(gpipe(4, 8), limit=[4, 4, 8, 8])
except ScheduleError as wrong:
    print(wrong)

# %% [markdown]
# ## Three ideas of the field
#
# **One forward, one backward** (1F1B, 2018): a rank begins to go back as early as it can, and then
# alternates. The bubble is the same, but rank 0 holds four microbatches instead of twelve.
# **Interleaving** (2021): each rank owns two stages that are half as long and far apart, so that
# the line is filled in half the time. **Zero bubble** (2023): the backward pass of a stage makes
# two things, the gradient of its input (`I`), for which the rank before it waits, and the gradient
# of its weights (`W`), for which nobody waits. So `W` can be put off, into the bubbles.

# %%
RANKS, COUNT = 4, 12
_, panels = plt.subplots(4, 1, figsize=(12, 9.5))
halves = Times(F=0.5, I=0.5, W=0.5)  # of stages that are half as long
drawn = {
    gpipe(RANKS, COUNT): Times(),
    one_f_one_b(RANKS, COUNT): Times(),
    interleaved(RANKS, COUNT): halves,
    zb_v(RANKS, COUNT): halves,
}
for ax, (schedule, times) in zip(panels, drawn.items(), strict=True):
    schedule.show(times).plot(ax)
    ax.set(xlim=(0, 45.5), xlabel="")
panels[-1].set_xlabel("time (forward passes of a quarter of the model)")
plt.show()

# %% [markdown]
# The last, ZB-V (Qi et al., 2024), has all three ideas: two stages a rank, laid out as a **V**, so
# that rank 0 has the first and the last, and backward passes in two parts. Paler bars are the
# second stage. Its bubble is nearly none.
#
# ## One of our own
#
# All of these fill the bubble and hold as much as 1F1B, or more. What if memory is what one lacks?
# Holding less means that a microbatch must come back *soon* after it has gone. On a V, one that
# rushes down the ranks and up again and back, without waiting anywhere, is held for the shortest
# time there is.
#
# So think of one microbatch, and when each stage works on it: its path, in space and time. The
# next one takes the same path six ticks later, since each rank has six things to do for each: two
# `F`, two `I`, two `W`. (Qi et al. call this a *building block*, arXiv 2405.15362.) If no two
# things on one rank fall on the same tick modulo six, nobody ever collides. The path has seven
# numbers: how many ticks from rank to rank on each of its four legs, and at the three turns.
# Weights' gradients go wherever there is room:

# %%
V = [0, 1, 2, 3, 3, 2, 1, 0]  # the rank of each stage
PERIOD = 6


def repeated(down, turn, up, pause, down_again, turn_again, up_again, count=COUNT):
    """Each microbatch takes the same path, one every six ticks; None if two collide."""
    legs = [(0, down), (turn, up), (pause, down_again), (turn_again, up_again)]
    delays = [delay for first, then in legs for delay in (first, then, then, then)]
    stages = [*range(8), *reversed(range(8))]
    path = list(zip(itertools.accumulate(delays), "F" * 8 + "I" * 8, stages, strict=True))
    taken = {(V[stage], tick % PERIOD) for tick, _, stage in path}
    if len(taken) < len(path):
        return None
    for made, _, stage in path[8:]:
        free = (t for t in itertools.count(made + 1) if (V[stage], t % PERIOD) not in taken)
        tick = next(free)
        taken.add((V[stage], tick % PERIOD))
        path.append((tick, "W", stage))
    rows = [[] for _ in range(RANKS)]
    for m in range(count):
        for tick, kind, stage in path:
            rows[V[stage]].append((tick + PERIOD * m, Action(kind, stage, m)))
    return Schedule([[action for _, action in sorted(row)] for row in rows], "our own")


rush = repeated(1, 1, 1, 1, 1, 1, 1)
assert rush is not None
print(verify(rush))
print("\n".join(line[:90] + " …" for line in str(rush).splitlines()))

# %%
_, panels = plt.subplots(2, 1, figsize=(12, 5))
for ax, schedule in zip(panels, (rush, zb_v(RANKS, COUNT)), strict=True):
    schedule.show(halves).plot(ax)
    for bar in schedule.show(halves).bars:
        if bar.action.microbatch == 4:
            edge = {"facecolor": "none", "edgecolor": RED, "linewidth": 2}
            ax.add_patch(Rectangle((bar.start, bar.rank - 0.45), bar.end - bar.start, 0.9, **edge))
    ax.set(xlim=(0, 45.5), xlabel="")
panels[-1].set_xlabel("time (forward passes of a quarter of the model)")
plt.show()

# %% [markdown]
# Framed in red is the path of microbatch 4. In ours it is a straight line from the top to the
# bottom and back, twice, and then it is gone; in ZB-V it lies about. Rank 0 holds four halves of
# a microbatch at most where 1F1B holds four whole ones: half the memory. And though it has a
# bubble at both ends, it is still faster than 1F1B.
#
# ## All of them
#
# A table costs a millisecond to verify and to time. So let us not be content with one path and
# try them all, every number from 1 to 3:

# %%
found = []
for delays in itertools.product((1, 2, 3), repeat=7):
    if schedule := repeated(*delays):
        found.append((max(verify(schedule).peak) / 2, schedule.show(halves).end, delays))
memory, time, _ = zip(*found, strict=True)
best = [min((f for f in found if f[0] == held), key=lambda f: f[1]) for held in sorted({*memory})]
best = [f for i, f in enumerate(best) if all(f[1] < other[1] for other in best[:i])]
for held, end, delays in best:
    print(f"holds {held:.1f} microbatches, takes {end:.1f}: repeated{delays}")

# %%
known = [(build(RANKS, COUNT), Times(), 1) for build in (gpipe, one_f_one_b, zb_h1)]
known += [(build(RANKS, COUNT), halves, 2) for build in (interleaved, zb_v, dualpipe_v)]

_, ax = plt.subplots(figsize=(8.5, 4))
ax.plot(memory, time, "o", color=BLUE, alpha=0.35, label=f"our own, {len(found)} paths")
ax.plot(*list(zip(*best, strict=True))[:2], ".-", color=BLUE)
for schedule, times, share in known:
    x, y = max(verify(schedule).peak) / share, simulate(schedule, times).end
    ax.plot(x, y, "s", color=ORANGE)
    below = schedule.name == "ZB-H1"
    where = {"xytext": (-7, -3) if below else (7, 3), "ha": "right" if below else "left"}
    ax.annotate(schedule.name, (x, y), textcoords="offset points", size=8, **where)
ax.axhline(3 * COUNT, color=GREY, linestyle=":")
ax.text(12.2, 3 * COUNT + 0.15, "no bubble at all", ha="right", color="0.4", size=8)
ax.set(xlabel="held by the fullest rank (microbatches)", xlim=(1.5, 12.7))
ax.set_ylabel("time (forward passes\nof a quarter of the model)")
ax.set_title(f"{RANKS} ranks, {COUNT} microbatches", size=10)
ax.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# To the left and below is better. The line of our own begins where nobody else is, at half of
# 1F1B's memory, and ends next to ZB-V. Which point is best depends on how much memory there is
# and on what passes really take: `Times` may have a number for each stage, measured
# (`per_stage(...).measure`), and a time for messages.
#
# Such a picture is a claim about time, not about gradients. Let us see that it trains.
#
# ## Run it
#
# A model for a pipeline is three functions: `first` turns what a microbatch has into activations,
# `stage` is applied as often as there are stages, and `last` makes the loss. We have eight virtual
# devices: four ranks of a pipeline (`pp`), twice, each half with a half of the rows (`dp`). The
# task is to say at which of 16 places a wave has its crest.

# %%
WIDTH, PLACES, ROWS = 32, 16, 8
mesh = make_mesh(dp=2, pp=RANKS)


def first(shared, batch):
    return batch["wave"] @ shared["in"]


def stage(w, x, batch):
    del batch
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def last(shared, y, batch):
    scores = jax.nn.log_softmax(y @ shared["out"])
    right = jnp.take_along_axis(scores, batch["crest"][:, None], 1)
    return jax.lax.psum(-jnp.sum(right), "dp") / (COUNT * ROWS)


rng = np.random.default_rng(0)
normal = lambda *shape: np.float32(rng.normal(size=shape) / shape[-2] ** 0.5)
weights = {"up": normal(8, WIDTH, WIDTH), "down": 0.5 * normal(8, WIDTH, WIDTH)}
shared = {"in": normal(PLACES, WIDTH), "out": normal(WIDTH, PLACES)}


def draw(seed):
    """A batch: twelve microbatches of eight noisy waves."""
    rng = np.random.default_rng(seed)
    crest = rng.integers(0, PLACES, (COUNT, ROWS), np.int32)
    angle = 2 * np.pi * (np.arange(PLACES) - crest[..., None]) / PLACES
    noise = 0.5 * rng.normal(size=angle.shape)
    return {"wave": np.float32(np.cos(angle) + noise), "crest": crest}


batch_specs = P(None, "dp")
put = lambda tree, spec: jax.device_put(tree, shardings(mesh, jax.tree.map(lambda _: spec, tree)))
common, both = put(shared, P()), put(draw(0), batch_specs)

# %% [markdown]
# `one_program` makes of these one compiled program, a scan over ticks inside of `shard_map`. The
# table is an *argument* of it, so that one program runs all schedules that fit its room. The
# weights are put in the order in which ranks own the stages, which for a V is not that of the
# model (`by_rank`, and back with `by_stage`).

# %%
theirs, smallest = zb_v(RANKS, COUNT), rush
room = table(theirs).room | table(smallest).room
run = one_program(stage, first, last, mesh=mesh, batch=batch_specs, room=room)


def pipelined(schedule, weights):
    loss, (d_weights, d_shared) = settle(
        run(schedule, put(by_rank(weights, schedule), P("pp")), common, both)
    )
    return loss, by_stage(jax.device_get(d_weights), schedule), d_shared


def one_device(weights, shared, batch):
    """The same model without a pipeline: all rows at once, stage after stage."""
    rows = jax.tree.map(lambda b: b.reshape(-1, *b.shape[2:]), batch)
    x = first(shared, rows)
    x, _ = jax.lax.scan(lambda x, w: (stage(w, x, rows), None), x, weights)
    scores = jax.nn.log_softmax(x @ shared["out"])
    return -jnp.mean(jnp.take_along_axis(scores, rows["crest"][:, None], 1))


true, gradients = jax.value_and_grad(one_device, (0, 1))(weights, shared, draw(0))
print(f"{'one device':10}  loss {true:.6f}")
for schedule in (smallest, theirs):
    loss, *got = pipelined(schedule, weights)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True)
    far = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    print(f"{schedule.name:10}  loss {loss:.6f}  gradients differ by {far:.0e} of the largest")
print("programs traced:", run.traced)

# %% [markdown]
# The same loss, and gradients that differ in the last digit of float32, since sums are taken in
# another order. Both schedules ran in the same program.
#
# One program has all ranks advance in step, in *ticks* that are as long as their slowest rank, and
# this has a price that the simulator knows too. `per_stage`, with a program for each pass, runs
# the same tables without ticks, on the devices of one process.

# %%
for schedule, times in ((one_f_one_b(RANKS, COUNT), Times()), (theirs, halves), (rush, halves)):
    ends = [simulate(schedule, times, lockstep=lockstep).end for lockstep in (False, True)]
    print(f"{schedule.name:8} takes {ends[0]:.1f}, in ticks {ends[1]:.1f}")

# %% [markdown]
# Ours loses nothing, since it was made of ticks; 1F1B, whose forward and backward passes take
# different times, waits a fifth of its time more.
#
# And training is what it was:

# %%
steps = 60
plain = jax.jit(jax.value_and_grad(one_device, (0, 1)))
losses = {"one device": [], "our own schedule, 8 devices": []}
for name, line in losses.items():
    w, s = weights, shared
    for seed in range(steps):
        if name == "one device":
            loss, (dw, ds) = plain(w, s, draw(seed))
        else:
            given = put(by_rank(w, rush), P("pp")), put(s, P()), put(draw(seed), batch_specs)
            loss, (dw, ds) = settle(run(rush, *given))
            dw = by_stage(jax.device_get(dw), rush)
        down = lambda p, g: p - 0.05 * np.asarray(g)
        w, s = jax.tree.map(down, w, dw), jax.tree.map(down, s, ds)
        line.append(float(loss))

_, ax = plt.subplots(figsize=(7, 3.2))
for (name, line), style in zip(losses.items(), ({"linewidth": 5, "alpha": 0.4}, {}), strict=True):
    ax.plot(line, color=ORANGE if style else BLUE, label=name, **style)
ax.set(xlabel="step (count)", ylabel="loss (nats)", ylim=(0, None))
ax.legend(frameon=False)
plt.show()
print(f"loss {losses['one device'][-1]:.3f} and {losses['our own schedule, 8 devices'][-1]:.3f}")

# %% [markdown]
# ## Take it elsewhere
#
# The table isn't tied to the program that runs it. `to_csv` writes the layout that
# `torch.distributed.pipelining` loads, and `from_csv` reads that of others; `save` and `load` keep
# it as text, and a diff of two schedules is a diff of two files.

# %%
print("\n".join(line[:80] + " …" for line in rush.to_csv().splitlines()))
again = Schedule.from_csv(rush.to_csv())
print("the same:", again == rush)

# %% [markdown]
# ## What to take home
#
# * A schedule is an order for each rank. Times, bubbles, messages and memory follow from it, and
#   can be had before anything is compiled.
# * Bubbles and memory are two currencies. 1F1B, interleaving and zero bubble are three points;
#   between and beyond them one can search, since a table costs a millisecond.
# * What can go wrong is known by name: `verify` lists rank, step and cell, and what would be right.
# * `greedy` makes a table from a rule of one line (*what is urgent?*), if a path isn't what one has
#   in mind.
