# %% [markdown]
# # Planning for 131,072 GPUs
#
# Nobody tries a layout out on 131,072 GPUs. By the time that the machine stands, somebody has
# decided how a model is to be split over it, and if that was wrong, all of them wait together. So
# the decision is made on paper; and paper is enough, to a few per cent. A training step is made
# of pieces whose cost is known: products, which run at a share of a peak; messages, which take
# bytes over a bandwidth, and hops; a schedule, whose bubble can be drawn; faults, which come at a
# rate.
#
# This notebook does it for one model, Llama 3 405B, because its makers have written down how it
# was trained (arXiv 2407.21783). We shall see why it has to be split in three ways at once and
# what each way costs; hold the paper to what others measured; then make the machine eight times
# as large as theirs. It will train a little over three times as fast. Where does the rest go, and
# what would one buy to get it back?

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from xform import device
from xform.sharding import plan

plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"
COLOURS = {"compute": BLUE, "communication": RED, "bubble": "#dddad2", "overhead": "0.5"}

model = plan.LLAMA_3_405B
TRAINED = 15.6e12  # tokens that it was trained on
BATCH = 2**24  # tokens of a step, on all devices
DAY = 86_400
print(model)
print(f"{model.parameters / 1e9:.1f} billion parameters")
print(f"{model.flops_per_token / 1e12:.2f} TFLOP a token, forward and backward")
print(f"{model.flops_per_token * TRAINED:.2g} FLOP in all")

# %% [markdown]
# ## The least it can take
#
# An H100 multiplies 989 · 10¹² numbers and adds them up in a second, at best. So:

# %%
peak = device("H100").peak["bfloat16"]
for count in (8, 16_384, 131_072):
    least = model.flops_per_token * TRAINED / (count * peak) / DAY
    print(f"{count:>7,} GPUs at their peak: {least:10,.1f} days")

# %% [markdown]
# A node of eight would need 158 years. 131,072 of them would need under four days, if they did
# nothing but multiply. That number is the ruler for everything below: *MFU* is the share of it
# that is reached.
#
# ## It does not fit
#
# A parameter is more than its two bytes in bfloat16. There is a float32 copy that small updates
# add up in, and the two moments of Adam (12 bytes together), and the gradient, which is summed in
# float32 (4 more). `predict` counts these, and what the layers keep for their backward pass:


# %%
def layout(devices, *, tp=8, pp=16, cp=1, batch=BATCH, **more):
    """The rest of a layout: rows of the batch go to `dp`, one after another where they must."""
    dp = devices // (tp * pp * cp)
    microbatches = batch // model.length // dp
    finest = dict(schedule="interleaved", chunks=-(-model.layers // pp))
    pipeline = finest if pp > 1 and microbatches >= pp else {}
    return plan.Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, microbatches=microbatches,
        **{"zero": 2 if microbatches > 1 else 1, **pipeline, **more},
    )  # fmt: skip


def predict(devices, split, batch=BATCH, machine=None, **more):
    machine = machine or plan.machine("H100", devices)
    return plan.predict(model, machine, split, batch, must_fit=False, **more)


COUNT = 2048  # a device for each row of the batch
splits = {
    "rows only (dp)": layout(COUNT, tp=1, pp=1, zero=0),
    "matrices too, by 8 (tp)": layout(COUNT, pp=1, zero=0),
    "layers too, by 16 (pp)": layout(COUNT, zero=0),
    "optimizer too (ZeRO 1)": layout(COUNT, zero=1),
    "gradients too (ZeRO 2)": layout(COUNT, zero=2),
    "parameters too (ZeRO 3)": layout(COUNT, zero=3),
}
needs = {name: predict(COUNT, split).memory for name, split in splits.items()}

_, (left, right) = plt.subplots(1, 2, figsize=(11.5, 3.3), width_ratios=(1.3, 1))
limit = device("H100").memory / 1e9
totals = [memory.total / 1e9 for memory in needs.values()]
fits = [BLUE if total < limit else RED for total in totals]
left.barh(list(needs), totals, color=fits)
for i, total in enumerate(totals):
    left.text(1.1 * max(total, limit), i, f"{total:,.0f} GB", va="center", size=8)
left.axvline(limit, color="0.2", linestyle=":")
left.set(xscale="log", xlim=(20, 60_000), xlabel="memory of the fullest device (GB)")
left.invert_yaxis()
start = np.zeros(4)
parts = zip(("parameters", "gradients", "optimizer", "activations", "workspace"),
            (BLUE, GREEN, ORANGE, RED, GREY), strict=True)  # fmt: skip
for part, colour in parts:
    held = np.array([getattr(memory, part) / 1e9 for memory in list(needs.values())[2:]])
    right.barh(["pp", "ZeRO 1", "ZeRO 2", "ZeRO 3"], held, left=start, color=colour, label=part)
    start += held
right.axvline(limit, color="0.2", linestyle=":", label="an H100 has")
right.set(xlabel="memory of the fullest device (GB)")
right.invert_yaxis()
right.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# Rows alone leave each device with the whole model: a hundred times what it has. Cut each matrix
# over the eight GPUs of a node (`tp`) and the layers over 16 nodes (`pp`), and the rest can be
# had by sharing the optimizer's state among the copies. This is how Llama 3 was split. Splitting
# the parameters too (ZeRO 3, or FSDP) would save a few gigabytes more, and would have every
# device gather them anew for each microbatch.
#
# ## What a split costs
#
# Every way to split has its own tax, and each is paid in another currency. `tp` sends activations
# in the middle of every layer, where nothing can hide them. `pp` sends little, and waits: the
# *bubble* at the beginning and at the end of a step. `dp` seems free, but a batch has only 2,048
# rows, and the more of them run side by side, the fewer are left to fill the pipelines with.


# %%
def taxes(ax, plans, labels, xlabel, title):
    """What a step of each plan goes to, as columns; 1 is what its arithmetic takes at peak."""
    start = np.zeros(len(plans))
    for kind, colour in COLOURS.items():
        part = np.array([p.step.parts[kind] / (p.seconds * p.mfu) for p in plans])
        ax.bar(labels, part, bottom=start, color=colour, label=kind, width=0.7)
        start += part
    for i, (p, top) in enumerate(zip(plans, start, strict=True)):
        held = f"{p.memory.total / 1e9:.0f} GB" + ("" if p.fits else ":\ntoo much")
        words = f"MFU {p.mfu:.0%}\n{held}"
        ax.text(
            i, top + 0.05, words, ha="center", va="bottom", size=7, color="0.2" if p.fits else RED
        )
    ax.set(xlabel=xlabel, ylim=(0, 5))
    ax.set_title(title, size=9)


_, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True)
sizes = (2, 4, 8)
plans = [predict(4096, layout(4096, tp=tp, pp=8)) for tp in sizes]
taxes(
    left, plans, list(map(str, sizes)), "tp: devices that share a matrix", "4,096 devices, pp = 8"
)
sizes = (4, 8, 16, 32)
plans = [predict(4096, layout(4096, pp=pp)) for pp in sizes]
taxes(middle, plans, list(map(str, sizes)), "pp: ranks of the pipeline", "4,096 devices, tp = 8")
sizes = (1, 2, 4, 8)
names = ["1f1b" if n == 1 else "interleaved" for n in sizes]
ways = zip(names, sizes, strict=True)
plans = [predict(16_384, layout(16_384, schedule=name, chunks=n)) for name, n in ways]
taxes(right, plans, list(map(str, sizes)), "stages of each rank", "16,384 devices, tp = 8, pp = 16")
left.set(ylabel="a step (times what it takes at peak)")
left.legend(frameon=False, loc="upper left", fontsize=8)
plt.show()

# %% [markdown]
# Compute, in blue, is nearly twice what it takes at peak, and the same in all. The art is in the
# rest. On the left, less `tp` sends less, and does not fit. In the middle, a longer pipeline
# waits more, and at first holds less. On the right there are four times the devices, so that each
# pipeline has 16 microbatches and not 64: then a rank that owns one stage waits half of its time,
# and one that owns eight short ones, which take turns (*interleaved*), an eighth of it.
#
# ## Is it true?
#
# A model of a machine is worth what it predicts of runs that it wasn't fitted to. Twelve have
# been published with enough detail to compute them: three of Llama 3, and nine of Megatron (arXiv
# 2205.05198), from 8 to 16,384 GPUs. For each kind of device one number, the share of the peak
# that large products keep up, was fitted to one of these runs; ten are left.

# %%
checked = plan.check_published()
checked

# %%
_, ax = plt.subplots(figsize=(8, 3.6))
for i, (row, _, error) in enumerate(checked.rows):
    colour = GREY if row.fitted else BLUE
    ax.plot([0, 100 * error], [i, i], color=colour, linewidth=2)
    ax.plot(100 * error, i, "o", color=colour)
names = [
    f"{row.model.name}, {row.devices:,} {row.device}, "
    f"{'128k positions' if row.model.length > 100_000 else row.layout.recompute}"
    for row, _, _ in checked.rows
]
ax.set_yticks(range(len(names)), names, size=8)
ax.axvline(0, color="0.3", linewidth=1)
ax.set(xlabel="predicted, against published (%); grey: fitted", xlim=(-10, 10))
ax.invert_yaxis()
plt.show()

# %% [markdown]
# The mean error is 2.4 %. That holds for machines of these kinds up to 16,384 devices. For more,
# nobody has published such a table; what follows is the same arithmetic, and an extrapolation.
#
# One more check, of everything together. `goodput` is what faults leave of the time, which we
# come to below. The makers' model card gives 30.84 million GPU hours for all of the training:


# %%
def days(p, tokens=TRAINED):
    """What all of training takes, faults counted in."""
    return tokens / (p.tokens_per_second * p.goodput) / DAY


THEIRS = 16_384
theirs = predict(THEIRS, layout(THEIRS, loss="dense"))
hours = days(theirs) * 24 * THEIRS
print(f"predicted: {days(theirs):.0f} days, {hours / 1e6:.1f} million GPU hours")
print(f"published: {30.84e6 / THEIRS / 24:.0f} days, 30.8 million, {hours / 30.84e6 - 1:+.0%}")

# %% [markdown]
# That is closer than it deserves to be. Part of the real training had longer rows, whose
# attention costs more, and part of it ran on fewer devices; and a plan knows nothing of restarts
# for reasons of taste. But it is the right number to have had before.
#
# ## 131,072
#
# Now eight times as many. What is the best layout? `search` tries all ways to split, leaves out
# what can't run or does not fit, and simulates the most promising ones:

# %%
found = plan.search(model, plan.machine("H100", 131_072), BATCH, show=6)
found

# %%
found.plot()
plt.show()

# %% [markdown]
# The same batch of 16.8 million tokens is 2,048 rows, and 131,072 devices don't even get one
# each. So the rows themselves have to be cut (`cp`, context parallelism): each device has 1,024
# positions of a row, a shard of each matrix, and layers of an eighth of the model. Products get
# thin, messages get many, and a third of the MFU is gone.
#
# From here on we ask for many machines, and don't need all layouts for each. Eight per node for
# `tp`, and the best of some `pp` and `cp`:


# %%
def best(devices, batch=BATCH, machine=None, **more):
    """The fastest of some layouts, among those that fit; rows are cut where there are few."""
    plans = []
    for pp in (8, 16):
        for cp in (1, 2, 4, 8):
            microbatches = batch // model.length * 8 * pp * cp // devices
            if microbatches >= 1 and (cp == 1 or microbatches <= pp):
                split = layout(devices, pp=pp, cp=cp, batch=batch)
                plans.append(predict(devices, split, batch, machine, **more))
    return min((p for p in plans if p.fits), key=lambda p: p.seconds)


print("search:", found.best.layout)
print("  ours:", best(131_072).layout)

# %%
counts = 2 ** np.arange(11, 18)
batches = {2**24: BLUE, 2**26: ORANGE, 2**28: GREEN}
curves = {batch: [best(int(n), batch) for n in counts] for batch in batches}

_, (left, right) = plt.subplots(1, 2, figsize=(11.5, 3.9))
for (batch, colour), plans in zip(batches.items(), curves.values(), strict=True):
    label = f"{batch / 1e6:.0f} million tokens a step"
    left.semilogx(counts, [100 * p.mfu for p in plans], "o-", color=colour, label=label, base=2)
    right.loglog(counts, [days(p) for p in plans], "o-", color=colour, label=label)
right.loglog(counts, days(curves[2**24][0]) * counts[0] / counts, ":", color="0.4",
             label="twice the devices, half the days")  # fmt: skip
right.plot(THEIRS, 30.84e6 / THEIRS / 24, "k*", markersize=11, label="Llama 3, as published")
left.set(xlabel="devices (count)", ylabel="MFU (% of peak)", ylim=(0, 50))
right.set(xlabel="devices (count)", ylabel="15.6 trillion tokens, with faults (days)")
right.set_yticks([10, 30, 100, 300], ["10", "30", "100", "300"])
for ax in (left, right):
    ax.set_xticks(counts, [f"{n:,}" for n in counts], size=7, rotation=25)
    ax.minorticks_off()
left.legend(frameon=False, fontsize=8, loc="lower left")
right.legend(frameon=False, fontsize=8)
plt.show()
few, many = (days(curves[2**24][i]) for i in (3, 6))
print(f"from 16,384 to 131,072 devices: {few:.0f} to {many:.0f} days, {few / many:.1f} times")

# %% [markdown]
# The blue line bends: each doubling gives less, and the last ones give little. With a batch of 64
# or 256 million tokens MFU would hardly fall at all. So is the answer a larger batch?
#
# ## The batch is not free
#
# A larger batch makes better steps, up to a point. Beyond its *critical* size, its rows say the
# same thing many times. The usual law (McCandlish et al., 2018): to reach a given loss takes `1 +
# B / B_crit` times the least number of tokens. Nobody knows `B_crit` of a run before it is over;
# for large language models, late in training, estimates are of millions to some tens of millions
# of tokens. So for three guesses, the days until the loss is that of 15.6 trillion tokens at 16.8
# million a step:

# %%
sizes = 2.0 ** np.arange(23, 29)
wide = [best(131_072, int(size)) for size in sizes]
_, ax = plt.subplots(figsize=(7.5, 3.8))
for critical, colour in ((4e6, RED), (16e6, ORANGE), (64e6, BLUE)):
    tokens = TRAINED * (1 + sizes / critical) / (1 + BATCH / critical)
    taken = [days(p, t) for p, t in zip(wide, tokens, strict=True)]
    ax.semilogx(sizes, taken, "o-", color=colour, label=f"critical: {critical / 1e6:.0f} million")
    least = int(np.argmin(taken))
    print(f"critical {critical / 1e6:2.0f} million: {taken[least]:.0f} days at "
          f"{sizes[least] / 1e6:.0f} million a step")  # fmt: skip
ax.set(xlabel="batch (tokens)", ylabel="131,072 devices, to the same loss (days)")
ax.set(yscale="log", ylim=(15, 250))
ax.set_yticks([20, 50, 100, 200], ["20", "50", "100", "200"])
ax.set_xticks(sizes, [f"{size / 1e6:.0f} M" for size in sizes])
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# On the left, 8 million tokens are too few rows to keep even short pipelines full. On the right,
# they are more than a step can learn from. The planner's half of this is a time for a step; the
# other half is a property of the data, and the two can't be chosen apart. If the critical batch
# is small, the machine is simply too large for the model: no layout helps against the lack of
# rows.
#
# ## A fault every 23 minutes
#
# In 54 days on 16,384 GPUs, Llama 3 was interrupted 419 times by what nobody had planned. That is
# a mean time of 5.8 years for one device with its share of host and network, which is a good one.
# But eight times the devices fail eight times as often. After each fault the job starts again
# from its last checkpoint, and what it did since is lost. Frequent checkpoints lose less and cost
# more; the best interval is Young's and Daly's, about √(2 · time to save · time between faults).
#
# Formulas of this kind rest on assumptions; so beside the curve stands a simulation, which draws
# faults one by one, also while it restarts.


# %%
def simulated(faults, devices, work, total=3e6, seed=0):
    """The share of the time that was useful: faults drawn at random, a checkpoint each `work` s."""
    rng, mean = np.random.default_rng(seed), faults.mtbf(devices)
    clock = done = 0.0
    fault = rng.exponential(mean)
    while done < total:
        if fault > clock + work + faults.save:
            clock, done = clock + work + faults.save, done + work
            continue
        clock = fault
        fault = clock + rng.exponential(mean)
        while fault < clock + faults.restart:  # before it is back
            clock, fault = fault, fault + rng.exponential(mean)
        clock += faults.restart
    return done / clock


_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
between = np.geomspace(20, 2000, 60)
tried = np.geomspace(25, 1600, 9)
for count, colour in ((16_384, BLUE), (131_072, RED)):
    share = [100 * plan.FAULTS.goodput(count, tau) for tau in between]
    drawn = [100 * simulated(plan.FAULTS, count, tau) for tau in tried]
    left.semilogx(between, share, color=colour, label=f"{count:,} devices")
    left.plot(tried, drawn, "o", color=colour, alpha=0.6)
    chosen = plan.FAULTS.interval(count)
    left.plot(chosen, 100 * plan.FAULTS.goodput(count), "k*", markersize=11)
    print(f"{count:>7,} devices: a fault in {plan.FAULTS.mtbf(count) / 60:.0f} minutes, a "
          f"checkpoint each {chosen:.0f} s, goodput {plan.FAULTS.goodput(count):.0%}")  # fmt: skip
left.set(xlabel="work between two checkpoints (s)", ylabel="goodput (% of the time)")
left.set(ylim=(0, 100), title="checkpoint in 10 s, restart in 10 min; dots: simulated")
left.title.set_size(9)
left.legend(frameon=False, loc="lower center")
for restart, colour in ((600, RED), (180, ORANGE), (60, GREEN)):
    faults = dataclasses.replace(plan.FAULTS, restart=restart)
    share = [100 * faults.goodput(int(n)) for n in counts]
    right.plot(counts, share, "o-", color=colour, label=f"restart in {restart // 60} min")
right.set(xscale="log", xlabel="devices (count)", ylabel="goodput (% of the time)", ylim=(0, 100))
right.set_xticks(counts, [f"{n:,}" for n in counts], size=7, rotation=25)
right.minorticks_off()
right.legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# Ten minutes from a fault to the next good step cost 16,384 devices little. 131,072 lose 42 % of
# their time to faults, and two thirds of that would be saved if those ten minutes were one. At
# this size, the restart is a part of the training loop.
#
# ## Where the days go
#
# All of it in one picture: each device's days, from the ones that the arithmetic itself takes to
# those that faults waste.

# %%
rows = {f"{n:,}\ndevices": curves[2**24][i] for n, i in ((16_384, 3), (131_072, 6))}
kinds = {
    "products, at peak": BLUE,
    "compute below peak": "#8fb3c9",
    "communication": RED,
    "bubble": "#dddad2",
    "overhead": "0.5",
    "faults": ORANGE,
}


def where(p):
    """Shares of the time of a run, by what it goes to."""
    step = p.step.parts
    useful = p.mfu * p.seconds
    rest = [step["compute"] - useful, step["communication"], step["bubble"], step["overhead"]]
    lost = p.seconds / p.goodput - p.seconds
    return np.array([useful, *rest, lost]) / (p.seconds / p.goodput)


_, ax = plt.subplots(figsize=(11, 2.6))
start = np.zeros(2)
shares_of = np.array([*map(where, rows.values())]).T
for (kind, colour), part in zip(kinds.items(), shares_of, strict=True):
    ax.barh(list(rows), 100 * part, left=start, color=colour, label=kind)
    for i, (x, width) in enumerate(zip(start, 100 * part, strict=True)):
        if width > 4:
            ink = "white" if colour in (BLUE, RED) else "0.1"
            ax.text(x + width / 2, i, f"{width:.0f} %", ha="center", va="center", color=ink)
    start += 100 * part
ax.set(xlabel="time of all devices (%)", xlim=(0, 100))
ax.invert_yaxis()
ax.legend(frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8)
plt.show()

# %% [markdown]
# Of the larger machine's time, a sixth is the arithmetic that was wanted. The largest single loss
# is not a matter of kernels or of networks.
#
# ## What would one buy?
#
# A plan is a function, so that one may ask it what each assumption is worth: change one, find the
# best layout again, and see how much faster training is, faults and all.

# %%
MANY = 131_072
machine = lambda **changes: plan.machine("H100", MANY, **changes)
larger = dataclasses.replace(device("H100"), memory=141e9)
fault = lambda **changes: dataclasses.replace(plan.FAULTS, **changes)
asked = {
    "restart in 1 min, not 10": dict(faults=fault(restart=60)),
    "faults half as often": dict(faults=fault(device_mtbf=2 * plan.FAULTS.device_mtbf)),
    "checkpoint in 1 s, not 10": dict(faults=fault(save=1)),
    "batch of 67 million tokens, not 17": dict(batch=2**26),
    "64 devices in a node, not 8": dict(machine=machine(node=64)),
    "800 Gb/s out of a node, not 400": dict(machine=machine(nic=100e9)),
    "200 Gb/s out of a node": dict(machine=machine(nic=25e9)),
    "pods joined at full rate, not 1 to 7": dict(machine=machine(oversubscription=1.0)),
    "141 GB of memory, not 80": dict(machine=plan.machine(larger, MANY)),
}
useful = lambda p: p.tokens_per_second * p.goodput
base = best(MANY)
gains = {name: useful(best(MANY, **change)) / useful(base) - 1 for name, change in asked.items()}
order = sorted(gains, key=lambda name: -gains[name])

_, ax = plt.subplots(figsize=(8.5, 3.6))
ax.barh(order, [100 * gains[name] for name in order],
        color=[BLUE if gains[name] >= 0 else RED for name in order])  # fmt: skip
for i, name in enumerate(order):
    where_to = max(gains[name], 0)
    ax.text(100 * where_to + 1, i, f"{gains[name]:+.0%}", va="center", size=8)
ax.axvline(0, color="0.3", linewidth=1)
ax.set(xlabel="tokens that count in a second, against the base (%)", xlim=(-20, 60))
ax.invert_yaxis()
plt.show()

# %% [markdown]
# Software that restarts in a minute is worth more than any network, and as much as a batch four
# times as large, whose tokens might teach less. More memory is worth nothing here, since at this
# size a device holds a small part of the model. It is another list for another model and another
# size, and that is the point of a plan: it takes seconds to ask.
#
# ## What a plan doesn't know
#
# * Slow devices, and jitter: the slowest of 131,072 sets the pace for all.
# * Messages that share a wire: an axis's messages don't slow another's here.
# * Whether faults of so many devices come one by one. A switch takes down many at once, and then
#   again none.
# * The data: whether a larger batch learns as much from a token.
#
# Each of these makes the true number worse than the predicted one. The planner was within 8 % of
# each of the twelve published runs, up to 16,384 devices; beyond, it is arithmetic that nobody
# has confirmed.
#
# ## What to take home
#
# * A model is split in several ways at once because each has its own tax: `tp` sends, `pp` waits,
#   `dp` needs rows, ZeRO needs both time and rows.
# * What ends scaling is the batch. More devices than rows means thinner products, more messages
#   and emptier pipelines, and no layout changes that.
# * Goodput is an exponential in the number of devices. Measure restarts as one measures kernels.
# * `plan.predict` says what a layout costs, part by part; `plan.search` finds the ones that fit;
#   `plan.check_published` says how far to trust them. `examples/plan.py` prints the tables.
