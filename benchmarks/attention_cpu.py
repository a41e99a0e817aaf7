"""Attention on a CPU: `xform.flex_attention` beside XLA's and PyTorch's, in one run, call by call.

    uv run --extra train benchmarks/attention_cpu.py
    uv run --extra train benchmarks/attention_cpu.py --torch-python torch/bin/python
    uv run --extra train benchmarks/attention_cpu.py --lengths 512 --seconds 1 --no-claims  # a look

Every peer gets its own layout and its own best way to say the mask, and is compiled beforehand.
PyTorch's block masks are made beforehand too, ours inside every call. Before a peer is timed its
values are compared with ours; one that differs is skipped. The second table holds what xform
promises: what a mask saves, and how much memory a call takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from turns import Call, Process, Skip, heading, serve, take_turns

MASKS = {  # of one query and one key and the document of each token, arrays of any library
    "full": None,
    "causal": lambda q, k, ids: q >= k,
    "window": lambda q, k, ids: (q >= k) & (q - k < 1024),
    "documents": lambda q, k, ids: (q >= k) & (ids[q] == ids[k]),
}
DOCUMENT = 1500
TOO_LARGE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
"""Bytes of temporaries: half of the machine's memory."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Config:
    """What is measured, and for how long."""

    torch_python: Path | None = None
    """A Python that imports torch; without it JAX runs alone."""
    masks: tuple[str, ...] = ("causal", "window", "documents")
    """Of full, causal, window (1,024 keys, causal), documents (of 1,500 tokens, causal)."""
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    heads: int = 4
    size: int = 64
    """Of a head."""
    seconds: float = 20.0
    """For each row, but no less than 5 rounds and no more than 50."""
    claims: bool = True


@dataclass(frozen=True)
class Case:
    """What one row measures; batch 1, float32."""

    mask: str
    length: int
    backward: bool = False
    heads: int = 4
    size: int = 64

    def __str__(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        return f"{self.mask:9} {self.length:>6} {direction:16}"

    def inputs(self) -> np.ndarray:
        """q, k, v and the output's cotangent, each `[1,T,H,D]`."""
        shape = (4, 1, self.length, self.heads, self.size)
        return np.random.default_rng(self.length).standard_normal(shape, np.float32)

    def ids(self) -> np.ndarray:
        return np.arange(self.length, dtype=np.int32) // DOCUMENT

    def dense_mask(self) -> np.ndarray | None:
        """`[T,T]`; None where dense attention has a word for the mask."""
        if self.mask in ("full", "causal"):
            return None
        i = np.arange(self.length)
        return MASKS[self.mask](i[:, None], i, self.ids())


# ---- the peers: a case -> a call without arguments, which returns [1,T,H,D] arrays ---------------


def jax_program(case: Case, attend: Callable, mask) -> tuple[Any, tuple]:
    """`attend(q, k, v, mask)` compiled by XLA, and its arguments."""
    import jax

    def forward(q, k, v, g, mask):
        return [attend(q, k, v, mask)]

    def both(q, k, v, g, mask):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return [out, *vjp(g)]

    args = jax.device_put((*case.inputs(), mask), jax.devices("cpu")[0])
    return jax.jit(both if case.backward else forward).lower(*args).compile(), args


def jax_call(compiled, args) -> Callable:
    import jax

    if (size := compiled.memory_analysis().temp_size_in_bytes) > TOO_LARGE:
        raise Skip(f"its temporaries would take {size / 2**30:.1f} GiB")
    return lambda: jax.block_until_ready(compiled(*args))


def xform(case: Case) -> tuple[Any, tuple]:
    from xform import flex_attention

    mask = MASKS[case.mask]

    def attend(q, k, v, ids):
        mask_mod = mask and (lambda b, h, q_idx, kv_idx: mask(q_idx, kv_idx, ids))
        return flex_attention(q, k, v, mask_mod=mask_mod)

    return jax_program(case, attend, case.ids())


def dense(case: Case) -> tuple[Any, tuple]:
    from jax.nn import dot_product_attention

    def attend(q, k, v, mask):
        return dot_product_attention(q, k, v, mask=mask, is_causal=case.mask == "causal")

    mask = case.dense_mask()
    return jax_program(case, attend, None if mask is None else mask[None, None])


def torch_call(case: Case, attend: Callable) -> Callable:
    """A call of `attend(q, k, v)`, whose layout is [1,H,T,D]."""
    import torch  # pyright: ignore[reportMissingImports]

    q, k, v, g = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in case.inputs())

    def forward():
        with torch.no_grad():
            return [attend(q, k, v).transpose(1, 2)]

    def both():
        moving = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*moving)
        return [x.transpose(1, 2).detach() for x in (out, *torch.autograd.grad(out, moving, g))]

    return both if case.backward else forward


def torch_flex(case: Case) -> Callable:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import flex_attention as flex  # pyright: ignore[reportMissingImports]

    if case.backward:
        raise Skip("PyTorch has no backward of it on CPUs")
    torch._dynamo.config.recompile_limit = 1000
    attend = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    mask, ids, n, blocks = MASKS[case.mask], torch.from_numpy(case.ids()), case.length, None
    if mask:
        mask_mod = lambda b, h, q_idx, kv_idx: mask(q_idx, kv_idx, ids)
        blocks = flex.create_block_mask(mask_mod, None, None, n, n, device="cpu")
    return torch_call(case, lambda q, k, v: attend(q, k, v, block_mask=blocks))


def torch_sdpa(case: Case) -> Callable:
    import torch  # pyright: ignore[reportMissingImports]

    mask = case.dense_mask()
    how = {"attn_mask": None if mask is None else torch.from_numpy(mask)}
    how["is_causal"] = case.mask == "causal"
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch_call(case, lambda q, k, v: attend(q, k, v, **how))


PEERS = {  # name: (library, case -> call); the first is ours
    "xform": ("jax", lambda case: jax_call(*xform(case))),
    "jax.nn": ("jax", lambda case: jax_call(*dense(case))),
    "torch flex": ("torch", torch_flex),
    "torch SDPA": ("torch", torch_sdpa),
}


# ---- the first table -----------------------------------------------------------------------------


def compare(case: Case, processes: dict[str, Process], seconds: float) -> tuple[str, list[str]]:
    """One row, and why peers were skipped in it."""
    calls = [Call(processes[lib], p, case) for p, (lib, _) in PEERS.items() if lib in processes]
    ours, worst, ready, reasons = None, 0.0, [], []
    for call in calls:
        values, skip = call.prepare()
        ours = values if ours is None else ours
        off = max((abs(x - y).max() for x, y in zip(values, ours, strict=not skip)), default=0.0)
        if not off <= TOLERANCE:
            skip = f"its values differ from xform's by {off:.1e}"
        if skip:
            reasons.append(f"{call.peer}: {skip}")
        else:
            ready, worst = [*ready, call], max(worst, off)
    times = {call.peer: ms for call, ms in take_turns(ready, seconds).items()}
    cells = [_times(times[call.peer]) if call.peer in times else "-" for call in calls]
    mine, *others = map(median, times.values())
    ratio = f"{mine / min(others):.2f}" if others else "-"
    return _row(str(case), cells, ratio, f"{worst:.0e}"), reasons


def _times(ms: list[float]) -> str:
    short = lambda x: f"{x:.0f}" if x >= 100 else f"{x:.1f}"
    return f"{short(median(ms))} ({short(min(ms))})"


def _row(case: str, cells: list[str], ratio: str, worst: str) -> str:
    return f"{case:33}{''.join(f'{x:>15}' for x in cells)}{ratio:>7}{worst:>8}"


# ---- the second table ----------------------------------------------------------------------------


def memory(case: dict) -> tuple[int, int]:
    """Bytes of temporaries, and by how much the first call grows the process, with its results."""
    import jax

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

    compiled, args = xform(Case(**case))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, which was compiling
    before = resident("VmRSS")
    jax.block_until_ready(compiled(*args))
    return compiled.memory_analysis().temp_size_in_bytes, resident("VmHWM") - before


def claims(process: Process, seconds: float) -> Iterator[str]:
    """Rows of the second table."""
    for backward in (False, True):
        at_4k = Case("full", 4096, backward)
        at_32k = Case("full", 32768, backward, heads=1)
        for full, mask, bound in ((at_4k, "causal", 0.6), (at_32k, "window", 0.1)):
            calls = [Call(process, "xform", replace(full, mask=m)) for m in (mask, "full")]
            for call in calls:
                call.prepare()
            part, whole = map(median, take_turns(calls, seconds).values())
            yield _verdict(calls[0].case, "time / that of full", part / whole, bound)
        case = replace(at_32k, mask="causal")
        sizes = Process(sys.executable, __file__).ask("memory", asdict(case))
        for what, size in zip(("temporaries", "growth of the process"), sizes, strict=True):
            yield _verdict(case, f"{what} / T×S float32", size / (4 * case.length**2), 0.03)


def _verdict(case: Case, what: str, found: float, bound: float) -> str:
    word = "pass" if found <= bound else "FAIL"
    return f"{case!s:33} {case.heads:>5}  {what:36}{found:7.3f}{bound:7.2f}   {word}"


def main() -> None:
    import tyro

    config = tyro.cli(Config, description=__doc__)
    pythons = {"jax": sys.executable, "torch": config.torch_python}
    processes = {lib: Process(python, __file__) for lib, python in pythons.items() if python}
    print(heading(processes))
    print(f"{config.heads} heads of {config.size}, batch 1, float32; ms, median (minimum)")
    print("ratio: xform's median to the best peer's; off: the furthest from xform's values\n")
    names = [peer for peer, (library, _) in PEERS.items() if library in processes]
    print(_row(f"{'mask':9} length pass", names, "ratio", "off"), flush=True)
    skipped = {}
    for backward in (False, True):
        for mask in config.masks:
            for length in config.lengths:
                case = Case(mask, length, backward, config.heads, config.size)
                row, reasons = compare(case, processes, config.seconds)
                print(row, flush=True)
                for reason in reasons:
                    skipped.setdefault(reason, []).append(" ".join(str(case).split()))
    for reason, cases in skipped.items():
        print(f"\nskipped {reason}\n  {', '.join(cases)}")
    if config.claims:
        print(f"\n{'mask':9} length pass             heads  claim {'found':>37} {'bound':>6}")
        for row in claims(processes["jax"], config.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(lambda peer, case: PEERS[peer][1](Case(**case)), memory=memory)
    else:
        main()
