# %% [markdown]
# # Train, break, resume
#
# In the 54 days that are on record of it, the training of Llama 3 405B was interrupted 466 times.
# A run that takes long does not run through; it is a chain of runs, and what counts is what the
# joints look like. A step that is lost is a nuisance. A step that is taken twice, rows that are
# never seen, a moment of the optimizer that starts from zero: these are worse, since nobody
# notices. The curve goes on, a little wrong.
#
# So there is one test that means something: **break a run, let it go on, and compare it with one
# that was never broken. Not roughly: bit by bit.** We do that here, with a real process and a
# signal that can't be caught, in the middle of a save; then once more, politely, and go on with
# another mesh.
#
# The model is small, and sees one page of text until it knows it by heart. At the end it has to
# recite it.

# %%
import codecs
import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.utils.capture import capture_output

from xform.sharding import cpu_devices
from xform.train import batch, decode, encode, pack

ROOT = Path.cwd().parent
sys.path.append(str(ROOT / "examples"))

cpu_devices(8)
plt.rcParams.update({"figure.dpi": 110, "figure.constrained_layout.use": True})
BLUE, ORANGE, RED, GREEN, GREY = "#2d6a8e", "#f2a65a", "#b5332e", "#3f9b5b", "0.6"

work = Path(tempfile.mkdtemp())
with contextlib.redirect_stdout(io.StringIO()):
    import this
page = codecs.decode(this.s, "rot13")
(work / "page.txt").write_text(page)
(work / "other.txt").write_text(textwrap.dedent(codecs.__doc__ or ""))
print(page[:97] + "…")

# %% [markdown]
# ## What a run is made of
#
# To go on, one needs all that a step depends on. Parameters, and the optimizer's moments of them.
# The number of the step, for the learning rate. And two things that are easily forgotten: where
# the data were, and where the random numbers were. A loader with a state of its own, in eight
# worker processes, is the classical way to get this wrong.
#
# The way out is to have no such state. `batch` is a *function* of the data, the seed and the
# number of the step: it can be asked for step 37 without the 36 before it.

# %%
rows = pack([encode("".join(chr(97 + i) * 4 for i in range(12)))], length=4)
in_order = [batch(rows, step, size=4, seed=0) for step in range(40)]
again = batch(rows, 37, size=4, seed=0)
print("the same rows:", all(np.array_equal(*x) for x in zip(again, in_order[37], strict=True)))

_, ax = plt.subplots(figsize=(9, 2.8))
for step, part in enumerate(in_order):
    drawn = [ord(decode(tokens)[0]) - 97 for tokens in part.tokens]
    colour = RED if step == 37 else BLUE if step // 3 % 2 else ORANGE
    ax.plot([step] * 4, drawn, "s", color=colour, markersize=5)
ax.set(xlabel="step (count); colours: epochs, and step 37", ylabel="row (count)", xlim=(-1, 40))
plt.show()

# %% [markdown]
# Each epoch, in one colour, has each of the twelve rows once, in an order of its own. The same
# goes for dropout and all else that is random: a key is folded with the number of the step, and
# so what a run has to remember of data and of chance is one integer.
#
# ## A run that nobody breaks
#
# `examples/train.py` is the loop. It is a command, so we start it as one, in a process of its
# own, on eight virtual devices: `dp=4` times `tp=2`. The flags make a model of a sixth of the
# usual size, and four rows of the page, which are a batch. What is held out is another text.

# %%
STEPS, LENGTH = 60, 222
MODEL = "layers=2 width=64 heads=4 kv-heads=4 head-size=16 hidden=160"
FLAGS = [f"--data={work / 'page.txt'}", f"--held-out={work / 'other.txt'}", "--batch=4"]
FLAGS += [f"--steps={STEPS}", f"--length={LENGTH}", "--learning-rate=8e-3", "--save-every=10"]
FLAGS += ["--dp=4", "--tp=2", "--prompt=The Zen of Python", "--temperature=0"]
FLAGS += [f"--model.{flag}" for flag in MODEL.split()]
ENV = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(ROOT),
}
jax.config.update("jax_compilation_cache_dir", ENV["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def start(folder, *flags):
    """Starts `examples/train.py` in a process of its own, whose words go to a file."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), f"--run={folder}", *flags]
    with (work / f"{folder.name}.txt").open("a") as words:
        return subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=ENV)


def losses(folder):
    """The losses of a run so far, from its file: a line of JSON for each step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def wait_for(process, condition, every=0.05):
    while not condition():
        assert process.poll() is None, "the run has ended"
        time.sleep(every)


whole, broken = work / "whole", work / "broken"
unbroken = start(whole, *FLAGS)
wait_for(unbroken, lambda: losses(whole))  # it has compiled, and the others need not
victim = start(broken, *FLAGS)
quiet = ("--data", "--held-out", "--model")
print("train.py", shlex.join(flag for flag in FLAGS if not flag.startswith(quiet)))

# %% [markdown]
# Two runs have begun, by the same command. One of them we leave in peace.
#
# ## Kill
#
# The other one gets `SIGKILL`, which no program can catch: the process is gone between two
# instructions, as when power fails. And we wait for the worst moment: one checkpoint is there, and
# the next is half written.

# %% tags=["measured"]
wait_for(victim, lambda: any(path.name.isdigit() for path in broken.glob("checkpoints/*")))
wait_for(victim, lambda: any(broken.glob("checkpoints/*.orbax-checkpoint-tmp")), 0.001)
victim.send_signal(signal.SIGKILL)
victim.wait()
killed = losses(broken)
print(f"killed after step {len(killed)}; what is left of it:")
for path in sorted(broken.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime):
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"  {path.name:30} {size / 1e3:7.0f} kB")

# %% [markdown]
# There are one or two checkpoints with a plain number, and one with a long name: that is the one
# which was being written. A checkpoint is written beside its place and put there by one rename,
# which a file system does at once or not at all. So a plain number means whole, and no process
# has to judge which files it can trust.
#
# ## Go on
#
# `--resume` finds the newest whole checkpoint and forgets the steps after it, in the curve too.
# This time we are polite: `SIGTERM` is what a cluster sends when it wants its machines back. The
# loop finishes its step, saves it, and says how to go on.

# %% tags=["measured"]
second = start(broken, "--resume")
wait_for(second, lambda: len(losses(broken)) >= len(killed) + 8)
second.send_signal(signal.SIGTERM)
code = second.wait()
asked = len(losses(broken))
print(f"it ended with code {code}: 128 + {code - 128}, as a shell would say")
print((work / "broken.txt").read_text().splitlines()[-1].replace(str(work), "…"))

# %% [markdown]
# The third part of the run has another mesh: `dp=2` times `tp=4` in the place of 4 times 2, as if
# other machines had come back than had gone. A checkpoint holds arrays, not the parts of devices,
# and whoever restores it says how they are to lie. This part runs in the notebook's own process:
# what a command does is a function.

# %%
import train
from settings import known_of
from xform.train import run

saved = known_of(run.read_run(broken)["config"])
third = dataclasses.replace(saved, run=str(broken), resume=True, dp=2, tp=4)
with capture_output():
    train.main(third)
assert unbroken.wait() == 0, (work / "whole.txt").read_text()[-2000:]
first, other = np.array(losses(whole)), np.array(losses(broken))
print("steps:", len(first), "and", len(other))

# %% [markdown]
# ## Compare

# %% tags=["measured"]
_, (ax, below) = plt.subplots(2, 1, figsize=(9, 5.2), sharex=True, height_ratios=(2, 1))
steps = np.arange(1, STEPS + 1)
ax.plot(steps, first, color=ORANGE, linewidth=5, alpha=0.5, label="never broken")
ax.plot(steps, other, color=BLUE, label="broken twice")
ax.plot(len(killed), killed[-1], "x", color=RED, markersize=11, markeredgewidth=3, label="SIGKILL")
ax.plot(asked, other[asked - 1], "s", color=GREEN, markersize=9, label="SIGTERM, then another mesh")
ax.set(ylabel="loss (nats per byte)", ylim=(0, None))
ax.legend(frameon=False)
below.plot(steps, np.abs(first - other), color=BLUE)
below.set(xlabel="step (count)", ylabel="difference (nats)", ylim=(-2e-10, 1e-4))
below.set_yscale("symlog", linthresh=1e-9)
below.set_yticks([0, 1e-8, 1e-6, 1e-4])
for x in (len(killed), asked):
    below.axvline(x, color=GREY, linestyle=":")
plt.show()

# %%
same = first[:asked] == other[:asked]
print("bit by bit the same until the mesh was another:", bool(same.all()))
far = np.abs(first - other).max()
print("no loss differs by more than a thousandth of a nat:", bool(far < 1e-3))

# %% [markdown]
# Until the second joint the curves are not close, they are *equal*: the last bit of each loss,
# through a killed process. After it, devices add up in another order, and so the last digits
# differ. That is as it must be. A difference at a joint without a change of mesh would be a fault,
# and one sees it only if everything else is exact.
#
# ## What it refuses
#
# Going on with something else than before is the other way to spoil a run. A resumed run is held
# to what was saved with it: its config, its data by their contents, its tokenizer. What may
# change is what does not change the numbers, such as the mesh.

# %%
wrong = dataclasses.replace(saved, run=str(broken), resume=True, learning_rate=1e-4, batch=8)
try:
    train.main(wrong)
except ValueError as error:
    print(str(error).replace(str(work), "…"))

# %% [markdown]
# ## What it has learned
#
# A run ends by writing a text from its prompt. Here is what the unbroken one has said, with a
# temperature of 0: the likeliest byte, again and again.

# %% tags=["measured"]
print((work / "whole.txt").read_text().split("held out\n")[1].strip())

# %% [markdown]
# That is the page's first row, byte by byte. A row can't look at the one before it, so a model that
# knows all four can be asked for all four: give it the first 17 bytes of each, and it has to go on.
# Both models, the one that never stopped and the one that was killed, told to stop, and moved:

# %%
from generate import generate, trained

asked_for = encode(page)
starts = np.stack([asked_for[i : i + 17] for i in range(0, len(asked_for), LENGTH)])
recited = []
for folder in (whole, broken):
    params, info = trained(folder)
    rest = generate(
        params, starts, info["model"], tokens=LENGTH - 17, key=jax.random.key(0), temperature=0.0
    )
    recited.append(decode(np.concatenate([starts, rest], axis=1).ravel())[: len(page)])
print(recited[1])
print("\nthe other one says the same:", recited[0] == recited[1])
print("it is the page, to the letter:", recited[0] == page)

# %% [markdown]
# Of 856 bytes the model was told 68. The others are in 127,296 numbers that have been through two
# files, a signal that can't be caught, a signal that can, and three arrangements of eight devices.
#
# ## What to take home
#
# * Make data and random numbers functions of the step. Then a run's state is what the optimizer
#   has, and an integer.
# * A checkpoint is whole or not there: write beside, then rename.
# * Test the joints bit by bit. On one mesh there is no excuse for a difference; on another one,
#   only the order of sums.
# * Refuse to go on with other data or another config, and say all that differs at once.
# * `tests/examples/test_stopping.py` does what this notebook does for every signal, in the middle
#   of a step and in the middle of a save.
