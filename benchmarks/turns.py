"""Peers that take turns, so that all meet the same noise: times from one run can be compared.

Libraries don't share a process, since their threads would; each gets its own, from its own Python:
one script that serves when it is called as `script serve`. Request and answer are a line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


class Skip(Exception):
    """Raised where a call is made: why a peer is not measured."""


def serve(make: Callable[[str, dict], Callable], **methods: Callable) -> None:
    """Answers requests until there are no more.

    Args:
        make: `make(peer, case)` returns a call without arguments, which waits for its arrays and
            returns them, or raises `Skip`.
        methods: further requests by name; arguments and answers are JSON.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    calls: dict[str, Callable] = {}

    def prepare(key: str, peer: str, case: dict, path: str) -> str:
        try:
            calls[key] = make(peer, case)
        except Skip as skip:
            return str(skip)
        calls[key]()
        np.savez(path, *map(np.asarray, calls[key]()))
        return ""

    def milliseconds(key: str) -> float:
        start = time.perf_counter()
        calls[key]()
        return 1e3 * (time.perf_counter() - start)

    version = lambda library: f"{library} {__import__(library).__version__}"
    methods |= dict(prepare=prepare, time=milliseconds, forget=calls.clear, version=version)
    for line in sys.stdin:
        method, *args = json.loads(line)
        print(json.dumps(methods[method](*args)), file=answers)


class Process:
    """`script serve` in some Python; it ends when its input does."""

    def __init__(self, python: Path | str, script: str):
        self._script = subprocess.Popen(
            [python, script, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, method: str, *args) -> Any:
        """Returns the answer to one request."""
        stdin, stdout = self._script.stdin, self._script.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([method, *args]) + "\n")
        stdin.flush()
        if not (answer := stdout.readline()):
            raise SystemExit(f"The process that was asked for {method}{args} ended: see above.")
        return json.loads(answer)


@dataclass(frozen=True)
class Call:
    """One peer on one case, a dataclass of JSON values, in its process."""

    process: Process
    peer: str
    case: Any

    def prepare(self) -> tuple[list[np.ndarray], str]:
        """Compiles and warms up; returns the values, or none and why the peer is skipped."""
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            args = self._key, self.peer, asdict(self.case), file.name
            skip = self.process.ask("prepare", *args)
            return ([] if skip else list(np.load(file.name).values())), skip

    def time(self) -> float:
        """Milliseconds of one call."""
        return self.process.ask("time", self._key)

    @property
    def _key(self) -> str:
        return f"{self.peer} {self.case}"


def take_turns(calls: Sequence[Call], seconds: float) -> dict[Call, list[float]]:
    """Returns the times of 5 to 50 rounds, in which each is called once, there and back again."""
    times: dict[Call, list[float]] = {call: [] for call in calls}
    end, rounds = time.monotonic() + seconds, 0
    while rounds < 5 or (rounds < 50 and time.monotonic() < end):
        for call in calls[:: -1 if rounds % 2 else 1]:
            times[call].append(call.time())
            time.sleep(0.02)  # threads of the last peer may still spin
        rounds += 1
    for process in {call.process for call in calls}:
        process.ask("forget")
    return times


def heading(processes: dict[str, Process]) -> str:
    """The command, the machine, the versions and the commit, for processes by library."""
    git = lambda *args: subprocess.run(
        ["git", "-C", Path(__file__).parent, *args], capture_output=True, text=True, check=False
    ).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = ", changed" if git("status", "--porcelain", "--", "../xform") else ""
    versions = [process.ask("version", library) for library, process in processes.items()]
    return (
        f"$ python {shlex.join(sys.argv)}\n"
        f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n"
        f"Python {platform.python_version()}, {', '.join(versions)}, commit {commit}{changed}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [x.split(": ")[1] for x in lines if x.startswith("model name")]
    return models[0] if models else platform.processor()
