"""How far `memory` is from XLA's buffer assignment: programs of all kinds, for two devices.

`PYTHONPATH=examples:tests python benchmarks/memory.py [cpu] [H200] [--names WORD …]`. XLA compiles
each program (some 5 minutes on a CPU for a CPU, 20 for an H200, which need not be there); `memory`
only traces it. With `--found FILE` what XLA assigns is read from there, and added where it is not
known yet: it does not change with the model. The table has every program whose peak is off by more
than a tenth: what XLA assigns (arguments, results and temporaries, those that share memory once),
what `memory` says, and the temporaries of both.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from memory_programs import PROGRAMS
from test_memory import assigned

from xform import memory
from xform._hlo import lower_for


class Error(NamedTuple):
    """One program: bytes in all and of temporaries, found by XLA and predicted."""

    name: str
    found: int
    predicted: int
    found_inside: int
    predicted_inside: int

    @property
    def relative(self) -> float:
        return self.predicted / self.found - 1

    def __str__(self) -> str:
        sizes = (self.found, self.predicted, self.found_inside, self.predicted_inside)
        columns = " ".join(f"{size / 1e6:9.3f}" for size in sizes)
        return f"{self.name:30s} {100 * self.relative:+7.1f} {columns}"


type Found = dict[str, list[int]]
"""What XLA assigns to a program on a device: bytes in all, and of temporaries."""


def found_by_xla(name: str, device: str, known: Found) -> list[int]:
    """What XLA assigns to a program, compiled unless that is known."""
    key = f"{name} on {device}"
    if key not in known:
        f, *args = PROGRAMS[name]()
        if device == "cpu":
            lowered = (f if hasattr(f, "lower") else jax.jit(f)).lower(*args)
        else:
            lowered = lower_for(device, f, *args)
        compiled = lowered.compile()
        inside = compiled.memory_analysis()
        assert inside is not None
        known[key] = [assigned(compiled), inside.temp_size_in_bytes]
    return known[key]


def compare(name: str, device: str, known: Found) -> tuple[Error, float]:
    """Both figures of a program, and the seconds that the prediction took, tracing included."""
    f, *args = PROGRAMS[name]()
    start = time.process_time()
    said = memory(f, device=device)(*args)
    seconds = time.process_time() - start
    total, inside = found_by_xla(name, device, known)
    return Error(name, total, said.peak, inside, said.temporaries), seconds


def report(device: str, names: list[str], known: Found) -> None:
    print(f"\n{device + ', MB':30s} {'off by %':>7s} {'XLA':>9s} {'memory':>9s} ", end="")
    print(f"{'XLA temp.':>9s} {'memory':>9s}", flush=True)
    errors, total = [], 0.0
    for name in names:
        error, seconds = compare(name, device, known)
        errors.append(error)
        total += seconds
    for error in sorted(errors, key=lambda e: -abs(e.relative)):
        if abs(error.relative) > 0.1:
            print(error)
    off = [abs(error.relative) for error in errors]
    print(
        f"{len(off)} programs: {sum(e > 0.1 for e in off)} off by more than 10 %, "
        f"{sum(e > 0.05 for e in off)} by more than 5 %; mean {100 * sum(off) / len(off):.1f} %, "
        f"median {100 * sorted(off)[len(off) // 2]:.1f} %; predicted in {total:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("devices", nargs="*", default=["cpu", "H200"])
    parser.add_argument("--names", nargs="*", default=[""], help="words of names")
    parser.add_argument("--found", type=Path, help="a file of what XLA assigns, kept")
    args = parser.parse_args()
    known: Found = {}
    if args.found is not None and args.found.exists():
        known = json.loads(args.found.read_text())
    names = [name for name in PROGRAMS if any(word in name for word in args.names)]
    print("$ PYTHONPATH=examples:tests python benchmarks/memory.py", *args.devices)
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {os.cpu_count()} cores")
    with jax.numpy_rank_promotion("allow"):
        for device in args.devices:
            report(device, names, known)
            if args.found is not None:
                args.found.write_text(json.dumps(known))


if __name__ == "__main__":
    main()
