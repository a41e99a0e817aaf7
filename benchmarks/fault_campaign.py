"""Faults of every kind in processes that train, and whether the run comes out as without them.

    .uv/bin/uv run --extra train benchmarks/fault_campaign.py --faults 200 --seed 0 --at-once 8

Real processes train a tiny model on the loopback, by `examples/train.py`. One after another they
are killed, stopped, slowed down, robbed of their disk and of their newest checkpoint; a supervisor
starts them again, sometimes fewer, and after each fault asks that losses are those of a run that
was left alone, to 1e-5, and that no step is lost whose checkpoint was whole. Several supervisors
share the faults, each with runs and chances of its own: two cores for each are enough.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

TOLERANCE = 1e-5
HUNG = 75
LOG = "faults.jsonl"
# Processes fork from one that has imported everything and started nothing: 6 s less for each.
CONTEXT = get_context("forkserver")
LATE = ["matplotlib.backends.backend_agg", "grain.python", "jaxlib.mlir.dialects.mhlo"]
CONTEXT.set_forkserver_preload(["train", *LATE])


# ---- in a process that trains --------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One start of all processes of a run, and the fault that awaits it.

    Attributes:
      folder: The run's.
      processes: How many.
      port: Where they meet.
      fault: Which of `FAULTS`; None leaves them alone.
      step: The step that the fault comes at.
      rank: The process that it comes to.
      steps: How many the run has.
      hang: Seconds that a phase may take where a process is to hang.
      pause: Seconds that a slow process comes late.
      fsdp: Whether processes share parameters, and so scatter gradients, instead of adding them.
    """

    folder: Path
    processes: int
    port: int
    fault: str | None = None
    step: int = 0
    rank: int = 0
    steps: int = 40
    hang: float = 4.0
    pause: float = 1.0
    fsdp: bool = False

    @property
    def patience(self) -> float:
        """How long a phase may take: long where none is to hang, however busy the machine is."""
        return self.hang if HUNG in (FAULTS[self.fault].codes if self.fault else ()) else 60.0


def at_step(life: Life, act: Callable[[], object]) -> None:
    """Does something once a step asks for its data."""
    from xform.train.clock import Clock

    enter = Clock.enter

    def faulty(clock, phase, step=None):
        enter(clock, phase, step)
        if (phase, step) == ("data", life.step):
            act()

    setattr(Clock, "enter", faulty)  # noqa: B010


def at_event(name: str, act: Callable[[], object]) -> Callable[[Life], None]:
    """Does something when Python is about to touch a checkpoint that is not whole yet."""

    def install(life: Life) -> None:
        def hook(event: str, args: tuple) -> None:
            if event != name or "orbax-checkpoint-tmp" not in str(args[0]):
                return
            number = Path(str(args[0])).name.partition(".")[0]
            if number.isdigit() and int(number) >= life.step:
                act()

        sys.addaudithook(hook)

    return install


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("as asked for")


def fill_the_disk() -> None:
    """No file may grow beyond a kilobyte from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def end_with_parent() -> None:
    """Has this process end, and those that it started, once the one that started it is gone."""

    def watch() -> None:
        parent = parent_process()
        wait([parent.sentinel] if parent else [])
        for child in active_children():  # one that is stopped can't watch by itself
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()


def work(life: Life, rank: int, log: str) -> None:
    """Trains, as one of some processes, until the fault."""
    end_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    import jax

    import train
    from xform.sharding import cpu_devices
    from xform.train import processes, run

    cpu_devices(1)
    jax.config.update("jax_platforms", "cpu")
    # Lives run the same programs: the first one compiles them for all.
    jax.config.update("jax_compilation_cache_dir", str(life.folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if life.fault and rank == life.rank:
        FAULTS[life.fault].install(life)
    with run.told(train.__file__):
        processes.join(f"localhost:{life.port}", life.processes, rank)
        try:
            with processes.each_for_itself(train.__file__):
                train.main(config_of(life, rank))
        finally:
            jax.distributed.shutdown()  # a fork has no end of its own that does


def config_of(life: Life, rank: int):
    """Returns the config of a tiny model on one device in each process."""
    import llama
    import parallel
    import train

    model = llama.Config(layers=1, width=16, heads=2, kv_heads=2, head_size=8, hidden=16, codes=64)
    return train.Config(
        model=model, steps=life.steps, batch=12, length=16, learning_rate=1e-3, save_every=2,
        data=(str(life.folder.parent / "tokens.bin"),), held_out_rows=4, token_dtype="uint16",
        dp=life.processes, tp=1, processes=life.processes, process=rank,
        hang=life.patience, spike=None, coordinator=f"localhost:{life.port}", run=str(life.folder),
        resume=(life.folder / "run.json").exists(), layout=parallel.Layout(fsdp=life.fsdp),
    )  # fmt: skip


# ---- faults --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and how it shows.

    Attributes:
      install: Done in the process that it comes to, before it trains.
      send: A signal to that process once the step before is made.
      codes: How at least one process is to end.
      damages: Done to the newest checkpoint once all have ended.
      named: What the others must say of it, with the rank and the seconds that it may hang.
    """

    install: Callable[[Life], None] = lambda life: None
    send: signal.Signals | None = None
    codes: tuple[int, ...] = ()
    damages: Callable[[Path], None] | None = None
    named: str | None = None


def tear(folder: Path) -> None:
    """Cuts the largest file of a checkpoint in half, as a machine does that loses its power."""
    largest = max((x for x in folder.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


FAULTS = {
    "killed": Fault(send=signal.SIGKILL, codes=(-signal.SIGKILL,)),
    "stopped": Fault(send=signal.SIGSTOP, codes=(HUNG,), named="rank {} gives no sign of life"),
    "asked to stop": Fault(send=signal.SIGTERM, codes=(128 + signal.SIGTERM,)),
    "exception": Fault(lambda life: at_step(life, fail), codes=(1,)),
    "slow": Fault(lambda life: at_step(life, lambda: time.sleep(life.pause)), codes=(0,)),
    "hung": Fault(
        lambda life: at_step(life, lambda: time.sleep(3600)), codes=(HUNG,),
        named="rank {} hangs: for {:.1f} s it was at step",
    ),
    "full disk": Fault(lambda life: at_step(life, fill_the_disk), codes=(1,)),
    "killed as it writes": Fault(at_event("os.mkdir", die), codes=(-signal.SIGKILL,)),
    "killed before it commits": Fault(at_event("os.rename", die), codes=(-signal.SIGKILL,)),
    "torn checkpoint": Fault(send=signal.SIGKILL, codes=(-signal.SIGKILL,), damages=tear),
}  # fmt: skip
OF_THE_FIRST = ("killed as it writes", "killed before it commits")


# ---- the supervisor ------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a life."""

    codes: list[int | None]
    seconds: float
    said: list[str]

    @property
    def finished(self) -> bool:
        """Whether the run came to its last step."""
        return all(code == 0 for code in self.codes)


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """Has a port that nobody else is given meanwhile; whoever knows of it may listen there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("localhost", 0))
        yield s.getsockname()[1]


def lines_in(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Returns the metrics of a run so far, or another such file, whole lines alone."""
    path = folder / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def committed(folder: Path) -> list[int]:
    """Returns the steps that have a checkpoint, as it is named once it is whole."""
    return sorted(int(x.name) for x in (folder / "checkpoints").glob("*") if x.name.isdigit())


def live(life: Life, limit: float = 600.0) -> Outcome:
    """Starts processes, lets the fault come, and ends them all once one has ended badly."""
    start = time.monotonic()
    logs = [str(life.folder.parent / f"{life.folder.name}-{r}.log") for r in range(life.processes)]
    workers = [CONTEXT.Process(target=work, args=(life, r, x)) for r, x in enumerate(logs)]
    for worker in workers:
        worker.start()
    try:
        if not let_come(life, workers, limit):
            raise TimeoutError(f"{life} did not end: {said(logs)}")
        codes = [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return Outcome(codes, time.monotonic() - start, said(logs))


def let_come(life: Life, workers: Sequence[BaseProcess], limit: float) -> bool:
    """Returns whether processes ended in time, or one of them badly, once the fault has come."""
    fault, since, end = FAULTS.get(life.fault or "", Fault()), time.time(), time.monotonic() + limit
    stopped = None
    while time.monotonic() < end:
        if fault.send and not stopped and reached(life, since):
            stopped = workers[life.rank]
            os.kill(stopped.pid or 0, fault.send)
        # Those that hang are to end by themselves, but for the one that can't.
        left = [w for w in workers if not (fault.send == signal.SIGSTOP and w is stopped)]
        patient = set(fault.codes) <= {0, HUNG, 128 + signal.SIGTERM}
        ended = [w for w in left if w.exitcode is not None]
        if len(ended) == len(left) or (not patient and any(w.exitcode for w in ended)):
            return True
        time.sleep(0.01)
    return False


def reached(life: Life, since: float) -> bool:
    """Whether this life, and no life before it, has made the step before the fault's."""
    with contextlib.suppress(OSError, ValueError):
        lines = lines_in(life.folder)
        return any(x["step"] >= life.step - 1 and x["time"] > since for x in lines[-1:])
    return False


def said(logs: list[str]) -> list[str]:
    return [Path(log).read_text() if Path(log).exists() else "" for log in logs]


@dataclass
class Campaign:
    """Runs with faults beside one that has none.

    Attributes:
      root: A folder for all of them.
      seed: Of when and to whom faults come.
      steps: How many a run has.
      hang: Seconds after which processes that are to hang give up; ten times as many at their
        start.
      until: When no more faults come, by the monotonic clock: runs then go on to their end.
      losses: Those of the run that has none.
    """

    root: Path
    seed: int = 0
    steps: int = 40
    hang: float = 4.0
    until: float = math.inf
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def write_tokens(self) -> None:
        """Writes what all runs train on."""
        tokens = np.random.default_rng(0).integers(1, 64, 40_000).astype("<u2")
        # Something to learn: every other token follows from the one before.
        tokens[1::2] = (3 * tokens[::2] + 1) % 64
        (self.root / "tokens.bin").write_bytes(tokens.tobytes())

    def undisturbed(self) -> None:
        """Trains once without any fault, or did before; the others are to have its losses."""
        folder = self.root / "undisturbed"
        if len(lines_in(folder)) < self.steps:
            shutil.rmtree(folder, ignore_errors=True)
            self.write_tokens()
            with own_port() as port:
                outcome = live(Life(folder, 2, port, steps=self.steps))
            assert outcome.finished, outcome.said
        self.losses = np.array([x["loss"] for x in lines_in(folder)])
        assert len(self.losses) == self.steps
        assert len(set(self.losses)) == self.steps, "each step has its own"

    def faults(self, kinds: Sequence[str], part: int = 0) -> Iterator[tuple[Life, Outcome]]:
        """Yields lives with a fault each, of these kinds in turn, in as many runs as they take.

        Args:
          kinds: Some of `FAULTS`.
          part: Which of those that go on at once this is; each has chances of its own.
        """
        chance, number, left = random.Random(f"{self.seed} {part}"), 0, list(kinds)
        while left and time.monotonic() < self.until:
            folder, at = self.root / f"run-{part}-{number}", 0
            shutil.rmtree(folder, ignore_errors=True)  # of a campaign that was broken off
            while at < self.steps:
                left = left if time.monotonic() < self.until else []
                processes = 1 if chance.random() < 0.2 and at else 2
                kind = left[0] if left and at + 4 < self.steps else None
                rank = 0 if kind in OF_THE_FIRST else chance.randrange(processes)
                if kind in ("stopped", "hung") and processes == 1:
                    processes, rank = 2, chance.randrange(2)
                step = at + chance.randint(3, 4)
                with own_port() as port:
                    life = Life(folder, processes, port, kind, step, rank, self.steps, self.hang)
                    outcome = live(life)
                self.check(life, outcome, at)
                if kind:
                    del left[0]
                    yield life, outcome
                if outcome.finished:
                    break
                at = self.harm(life)
            shutil.rmtree(folder)
            number += 1

    def harm(self, life: Life) -> int:
        """Returns the step to go on from, once the newest checkpoint is damaged if it is to be."""
        steps, fault = committed(life.folder), FAULTS[life.fault or "slow"]
        if fault.damages and len(steps) > 1:
            fault.damages(life.folder / "checkpoints" / str(steps.pop()))
        return steps[-1] if steps else 0

    def check(self, life: Life, outcome: Outcome, before: int) -> None:
        """Raises unless a life did what it should: went on from where it was, to equal losses."""
        lines, steps = lines_in(life.folder), committed(life.folder)
        where = f"{life}\n{outcome.codes}\n" + "\n".join(x[-3000:] for x in outcome.said)
        started = [x["step"] - 1 for x in lines if "start" in x["seconds"]]
        assert [x["step"] for x in lines] == list(range(1, len(lines) + 1)), where
        assert len(lines) >= before, f"lines of steps that were saved are gone\n{where}"
        assert not started or max(started) >= before, f"it went on from {max(started)}\n{where}"
        assert (steps or [0])[-1] >= before, f"saved are {steps}\n{where}"
        losses = np.array([x["loss"] for x in lines])
        np.testing.assert_allclose(
            losses, self.losses[: len(losses)], rtol=0, atol=TOLERANCE, err_msg=where
        )
        if life.fault is None:
            assert outcome.finished, where
            return
        fault = FAULTS[life.fault]
        ended = {code for code in outcome.codes if code is not None}
        assert ended & set(fault.codes), where
        if fault.named:
            others = [x for r, x in enumerate(outcome.said) if r != life.rank or not fault.send]
            words = fault.named.format(life.rank, life.hang)
            assert any(words in x for x in others), where


# ---- the campaign from the command line ----------------------------------------------------------


def shuffled(kinds: Sequence[str], count: int, came: Counter[str], seed: int) -> list[str]:
    """Returns what is left of so many faults, of each kind as often, in an order by chance."""
    each, more = divmod(count, len(kinds))
    wanted = {kind: each + (i < more) for i, kind in enumerate(kinds)}
    left = [kind for kind in kinds for _ in range(wanted[kind] - came[kind])]
    random.Random(f"{seed} {came.total()}").shuffle(left)
    return left


def disturb(campaign: Campaign, kinds: Sequence[str], part: int) -> None:
    """Lets faults come to one run after another, and notes each in the log."""
    for life, outcome in campaign.faults(kinds, part):
        line = {"fault": life.fault, "step": life.step, "rank": life.rank, "of": life.processes}
        print(f"{part:3}: {line}", flush=True)
        with (campaign.root / LOG).open("a") as log:
            log.write(json.dumps(line | {"seconds": round(outcome.seconds, 2)}) + "\n")


def table(log: Sequence[dict]) -> str:
    """Returns how often each kind came, and how long a life with it took."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for line in log:
        seconds[line["fault"]].append(line["seconds"])
    rows = (f"{kind:28}{len(took):6}{mean(took):15.1f}" for kind, took in seconds.items())
    return "\n".join([f"{'fault':28}{'times':>6}{'seconds, mean':>15}", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults in processes that train.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="how many runs go on at once")
    parser.add_argument("--folder", type=Path, help="where a campaign goes on that was broken off")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more faults after them")
    parser.add_argument("--hang", type=float, default=Campaign.hang, help="seconds until one hangs")
    parser.add_argument("--kinds", nargs="*", default=tuple(FAULTS), choices=tuple(FAULTS))
    asked, start = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory() as own:
        root = asked.folder or Path(own)
        root.mkdir(parents=True, exist_ok=True)
        until = start + 60 * asked.minutes
        before = lines_in(root, LOG)
        campaign = Campaign(root, asked.seed + len(before), hang=asked.hang, until=until)
        campaign.undisturbed()
        came = Counter(line["fault"] for line in before)
        left, n = shuffled(asked.kinds, asked.faults, came, asked.seed), asked.at_once
        with ProcessPoolExecutor(n, CONTEXT, initializer=end_with_parent) as pool:
            parts = [pool.submit(disturb, campaign, left[i::n], i) for i in range(n)]
        log, wrong = lines_in(root, LOG), [error for part in parts if (error := part.exception())]
    print(table(log))
    if wrong:
        raise BaseExceptionGroup("a fault did not come out as it should", wrong)
    print(f"{len(log)} faults; all losses within {TOLERANCE}, no saved step lost")


if __name__ == "__main__":
    main()
