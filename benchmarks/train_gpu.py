"""A training step of 1.1 billion parameters on one H200: the example's model beside its peers.

    python3 benchmarks/train_gpu.py --seconds 300        # the table, each row in its own process
    python3 benchmarks/train_gpu.py --every              # with both heads and both states of each
    python3 benchmarks/train_gpu.py xform --heads 128    # one row
    python3 benchmarks/train_gpu.py xform --split        # and where its time goes, by `explain`

16 layers of width 2,048 and 8,192 units, a vocabulary of 32,768, 4 rows of 8,192 tokens, bfloat16,
AdamW; 32 heads of 64 on 8 keys, or 16 of 128 on 4: as many parameters and operations. Moments of
AdamW are bfloat16, or float32. MFU counts the model's operations (6 for each weight a token meets,
causal attention by half) at 989 TFLOP/s. Seconds to compile are those of a first compilation, with
what is traced. A step is the median of three times of four in flight. A row's process imports what
it needs while the one before it measures, and begins when that has ended.

`xform` is examples/llama.py: `scan` over layers, `fuse` between products, whose results the
backward pass makes again rather than fetch them, and `flex_attention`. `xform, unrolled` has one
layer after another, so that nothing is copied into stacks, keeps what `fuse` made, and has all
products by cuBLAS, which is what compiles fast. Peers: the same model written plainly
in JAX, with cuDNN's attention, layers in a `scan` or one after another; and in PyTorch, compiled,
with cuDNN's attention or FlexAttention.
"""

# pyright: reportMissingImports=false
# PyTorch is no dependency.

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

PEAK = 989e12
"""FLOP/s of an H200 in bfloat16, dense, by its data sheet."""
ROUNDS, CALLS = 3, 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rows of the table have in common, and what a row says.

    Attributes:
      heads: the size of a head.
      state: dtype of AdamW's moments.
      attention: "flex", "flex, any order" (of its backward sums) or "cuDNN".
      again: whether the backward pass makes what `fuse` made again, instead of fetching it.
      fuse: whether the model is fused.
      update: "fuse" or "XLA": who makes the kernels of AdamW.
      unroll: how many layers are one turn of the loop.
      loss: "kernel", "kept" (a kernel that keeps logits) or "dense" (all logits at once).
      triton: whether XLA may write products itself, where it finds that faster than cuBLAS.
    """

    heads: int = 64
    state: str = "bfloat16"
    attention: str = "flex, any order"
    again: bool = True
    fuse: bool = True
    update: str = "fuse"
    unroll: int = 1
    loss: str = "dense"
    triton: bool = True
    layers: int = 16
    width: int = 2048
    units: int = 8192
    codes: int = 32_768
    rows: int = 4
    length: int = 8192

    @property
    def parameters(self) -> int:
        per_layer = 2 * self.width**2 * 5 // 4 + 3 * self.width * self.units
        return self.layers * per_layer + 2 * self.codes * self.width

    @property
    def flops(self) -> int:
        """Of a step."""
        products = 6 * (self.parameters - self.codes * self.width)
        attention = 6 * self.layers * self.width * self.length
        return self.rows * self.length * (products + attention)


# ---- in JAX --------------------------------------------------------------------------------------


def adamw(setting: Setting, *, fused: bool) -> tuple[Callable, Callable]:
    """AdamW with moments of a dtype: its first state, and what makes new parameters of old."""
    import jax
    import jax.numpy as jnp
    import optax

    import updates

    optimizer, dtype = optax.adamw(1e-4), jnp.dtype(setting.state)
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)

    def plain(params, state, grads):
        changes, state = optimizer.update(cast(grads), state, cast(params))
        return optax.apply_updates(params, changes), state

    def kernels(params, state, grads):
        adam, *rest = state
        count, slowness = adam.count + 1, (0.9, 0.999)
        numbers = (1.0, 1e-4, 1e-4, *(1 - b**count for b in slowness), True)
        each = lambda *own: updates.adamw(*own, *numbers, slowness=slowness)
        new = jax.tree.map(each, params, adam.mu, adam.nu, grads)
        params, mu, nu = jax.tree.transpose(jax.tree.structure(params), None, new)
        return params, (adam._replace(count=count, mu=mu, nu=nu), *rest)

    return lambda params: optimizer.init(cast(params)), kernels if fused else plain


def xform(setting: Setting) -> tuple[Callable, dict]:
    """The loss of the example's model, and its parameters."""
    import jax
    import jax.numpy as jnp

    import llama
    from xform import causal, flex_attention, linear_cross_entropy
    from xform.sharding.context import ContextParallel

    config = llama.Config(
        codes=setting.codes, layers=setting.layers, width=setting.width, hidden=setting.units,
        heads=setting.width // setting.heads, kv_heads=setting.width // setting.heads // 4,
        head_size=setting.heads, fuse=setting.fuse,
    )  # fmt: skip

    class Causal(ContextParallel):
        """Attention to what comes before, whatever the document, as the peers have it."""

        def attention(self, q, k, v, **options):
            del options
            if setting.attention == "cuDNN":
                return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            deterministic = setting.attention == "flex"
            return flex_attention(q, k, v, mask_mod=causal(), deterministic=deterministic)

    def scan(step, x, stack):
        made_again = lambda primitive, *_, **__: primitive.name != "fused"
        if setting.again:  # the loop itself keeps XLA from seeing both passes at once
            step = jax.checkpoint(step, policy=made_again, prevent_cse=False)
        turn = lambda x, p: (step(x, p), None)
        return jax.lax.scan(turn, x, stack, unroll=setting.unroll)[0]

    def loss(params, tokens, labels):
        ids = jnp.zeros_like(tokens)
        x, _ = llama.stream(params, tokens, ids, config, scan=scan, cp=Causal())
        if setting.loss == "dense":
            return dense_loss(x @ params["unembed"], labels)
        if setting.loss == "kept":
            return linear_cross_entropy(x, params["unembed"], labels, keep_logits=True)[0].mean()
        total, count = llama.surprise(params, x, labels)
        return total / count

    def init(key):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama.init(config, key))

    return loss, jax.jit(init)(jax.random.key(0))


def dense_loss(logits, labels):
    """The mean of all labels' losses, of all logits."""
    import jax
    import jax.numpy as jnp

    logits = logits.astype(jnp.float32)
    code = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    own = jnp.where(code == labels[..., None], logits, 0).sum(-1)  # whose gradient scatters nothing
    return (jax.nn.logsumexp(logits, -1) - own).mean()


def plain(setting: Setting, *, unrolled: bool) -> tuple[Callable, dict]:
    """The same model as one would write it in JAX."""
    import jax
    import jax.numpy as jnp

    import between

    xform_loss, params = xform(setting)
    del xform_loss
    size = setting.heads
    angles = jnp.arange(setting.length)[:, None] * 10_000.0 ** -jnp.linspace(
        0, 1, size // 2, endpoint=False
    )
    cos, sin = (f(angles)[:, None].astype(jnp.bfloat16) for f in (jnp.cos, jnp.sin))

    def turned(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x, p):
        h = between.rms_norm(x, p["attention_norm"])
        q, k, v = (
            (h @ p[name]).reshape(*h.shape[:2], -1, size) for name in ("query", "key", "value")
        )
        out = jax.nn.dot_product_attention(
            turned(q), turned(k), v, is_causal=True, implementation="cudnn"
        )
        x = x + out.reshape(x.shape) @ p["out"]
        h = between.rms_norm(x, p["hidden_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params, tokens, labels):
        unroll = setting.layers if unrolled else 1
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"], unroll=unroll)
        return dense_loss(between.rms_norm(x, params["norm"]) @ params["unembed"], labels)

    return loss, params


def measure_jax(
    setting: Setting, make: Callable, split: bool, *, fused: bool = False
) -> dict[str, float]:
    import jax

    loss, params = make(setting)
    init, update = adamw(setting, fused=fused)
    state = jax.jit(init)(params)
    shape = (setting.rows, setting.length)
    tokens, labels = (
        jax.random.randint(jax.random.key(i), shape, 0, setting.codes) for i in (1, 2)
    )

    def step(params, state, tokens, labels):
        value, grads = jax.value_and_grad(loss)(params, tokens, labels)
        return *update(params, state, grads), value

    start = time.perf_counter()
    options = {} if setting.triton else {"xla_gpu_enable_triton_gemm": False}
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    compiled = jitted.lower(params, state, tokens, labels).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    if split:
        from xform import explain

        report = explain(jitted)(params, state, tokens, labels)
        print(report, by_kind(report), sep="\n\n", flush=True)

    def run(count: int) -> float:
        nonlocal params, state
        value = math.nan
        for _ in range(count):
            params, state, value = compiled(params, state, tokens, labels)
        return float(value)

    first, last, times = run(2), math.nan, []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        last = run(CALLS)
        times.append((time.perf_counter() - start) / CALLS)
    temporaries = memory.temp_size_in_bytes if memory else math.nan
    return dict(seconds=median(times), compile=seconds, loss=last, first=first, bytes=temporaries)


KERNELS = ("flex_attention_backward", "flex_attention_careful", "flex_attention", "fused")
"""Of ours, as their instructions are named."""


def by_kind(report) -> str:
    """A measured step by what its kernels are, the dearest kind first; loops over layers summed."""
    module, found = report.program.module, {}
    instructions = {n: i for c in module.computations.values() for n, i in c.instructions.items()}
    for kernel in report.program.kernels:
        within = (module.computations[name] for name in instructions[kernel.name].calls)
        inner = [i for c in within for i in c.instructions.values() if i.opcode == "custom-call"]
        text = " ".join((kernel.op_name, *(i.text for i in inner)))
        own = next((name for name in KERNELS if f"/{name}/" in text), None)
        again = ", again" if "rematted" in text else ", backward" if "transpose(" in text else ""
        last = kernel.op_name.rsplit("/", 1)[-1]
        kind = "product" if kernel.work.matrix else own or f"{kernel.label} {last}"
        row = found.setdefault(kind + again, [0.0, 0, 0, 0.0])
        ms = report.run.kernels.get(kernel.name, 0) / 1e6
        work = kernel.work.matrix * kernel.trips
        found[kind + again] = [
            x + more
            for x, more in zip(
                row, (ms, kernel.trips, kernel.bytes * kernel.trips, work), strict=True
            )
        ]
    named = {kernel.name for kernel in report.program.kernels}
    for name, took in report.run.kernels.items():
        if name not in named:
            found[f"(no kernel of the program) {name}"] = [took / 1e6, 1, 0, 0.0]
    lines = [
        f"{ms:9.2f} ms {runs:5}  {size / max(ms, 1e-9) / 1e9:6.2f} TB/s "
        f"{work / max(ms, 1e-9) / 1e9:6.0f} TFLOP/s  {kind[:100]}"
        for kind, (ms, runs, size, work) in sorted(found.items(), key=lambda x: -x[1][0])
    ]
    return "\n".join(lines[:40])


# ---- in PyTorch ----------------------------------------------------------------------------------


def measure_torch(setting: Setting, attention: str, split: bool) -> dict[str, float]:
    del split
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, size = setting, setting.heads
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("cuda")
    torch.manual_seed(0)

    def turned(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda n, m: torch.nn.Linear(n, m, bias=False)
            self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(s.width) for _ in range(2)])
            self.query, self.out = linear(s.width, s.width), linear(s.width, s.width)
            self.key, self.value = linear(s.width, s.width // 4), linear(s.width, s.width // 4)
            self.gate, self.up = linear(s.width, s.units), linear(s.width, s.units)
            self.down = linear(s.units, s.width)

        def forward(self, x, cos, sin, mask):
            h = self.norms[0](x)
            heads = lambda y: y.view(*h.shape[:2], -1, size).transpose(1, 2)
            q, k, v = heads(self.query(h)), heads(self.key(h)), heads(self.value(h))
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            if mask is None:
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
            else:
                out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            x = x + self.out(out.transpose(1, 2).reshape(x.shape))
            h = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(s.codes, s.width)
            self.layers = torch.nn.ModuleList([Layer() for _ in range(s.layers)])
            self.norm = torch.nn.RMSNorm(s.width)
            self.unembed = torch.nn.Linear(s.width, s.codes, bias=False)

        def forward(self, tokens, labels, *rest):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, *rest)
            logits = self.unembed(self.norm(x)).flatten(0, 1).float()
            return functional.cross_entropy(logits, labels.flatten())

    angles = torch.arange(s.length)[:, None] * 10_000.0 ** -(torch.arange(size // 2) / (size // 2))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    mask = None
    if attention == "flex":
        sees = lambda b, h, q, k: q >= k
        mask = create_block_mask(sees, None, None, s.length, s.length, device="cuda")
    model = Model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    tokens, labels = (torch.randint(0, s.codes, (s.rows, s.length)) for _ in range(2))

    def run(count: int) -> float:
        loss = math.nan
        for _ in range(count):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                loss = compiled(tokens, labels, cos, sin, mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    start = time.perf_counter()
    run(1)
    seconds = time.perf_counter() - start
    first, last, times = run(2), math.nan, []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        last = run(CALLS)
        times.append((time.perf_counter() - start) / CALLS)
    taken = torch.cuda.max_memory_allocated()
    return dict(seconds=median(times), compile=seconds, loss=last, first=first, bytes=taken)


# ---- the table -----------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Setting, bool], dict[str, float]]] = {
    "xform": lambda s, split: measure_jax(s, xform, split, fused=s.update == "fuse"),
    "xform, unrolled": lambda s, split: measure_jax(
        unrolled(s), xform, split, fused=s.update == "fuse"
    ),
    "plain": lambda s, split: measure_jax(s, lambda s: plain(s, unrolled=False), split),
    "plain, unrolled": lambda s, split: measure_jax(s, lambda s: plain(s, unrolled=True), split),
    "torch, cuDNN": lambda s, split: measure_torch(s, "cudnn", split),
    "torch, flex": lambda s, split: measure_torch(s, "flex", split),
}


def unrolled(setting: Setting) -> Setting:
    """What pays where layers are no loop."""
    return dataclasses.replace(setting, unroll=setting.layers, again=False, triton=False)


def told(row: str, setting: Setting, found: dict[str, float]) -> str:
    mfu = setting.flops / found["seconds"] / PEAK
    varied = ", ".join(
        f"{f.name} {getattr(setting, f.name)}"
        for f in dataclasses.fields(Setting)
        if f.name not in ("heads", "state") and getattr(setting, f.name) != f.default
    )
    return (
        f"{row:18}{setting.heads:6}{setting.state:>10}{1e3 * found['seconds']:9.1f}{mfu:8.1%}"
        f"{found['compile']:9.1f}{found['bytes'] / 1e9:8.1f}{found['first']:9.4f}"
        f"{found['loss']:9.4f}  {varied}"
    )


def heading() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    columns = ("row", "heads", "state", "ms", "MFU", "compile", "GB", "loss", "later")
    widths = (18, 6, 10, 9, 8, 9, 8, 9, 9)
    names = "".join(
        f"{c:{'<' if i == 0 else '>'}{n}}"
        for i, (c, n) in enumerate(zip(columns, widths, strict=True))
    )
    return (
        f"$ python3 {' '.join(['benchmarks/train_gpu.py', *sys.argv[1:]])}\n"
        f"Python {platform.python_version()}, commit {commit or 'unknown'}\n\n{names}"
    )


TABLE = (
    ("xform", 64), ("xform", 128), ("xform, unrolled", 64), ("plain", 64), ("plain, unrolled", 64),
    ("torch, cuDNN", 64), ("torch, flex", 64),
)  # fmt: skip
"""Rows with their heads, the more wanted first."""


def rows(every: bool) -> list[list[str]]:
    """What is measured, as arguments of this program."""
    if not every:
        return [[row, "--heads", str(heads)] for row, heads in TABLE]
    states = lambda row: ("bfloat16", "float32") if row.startswith("xform") else ("bfloat16",)
    return [
        [row, "--heads", str(heads), "--state", state]
        for heads in (64, 128)
        for row in ROWS
        for state in states(row)
    ]


def begin(arguments: list[str]) -> subprocess.Popen:
    """The process of a row, which waits for a line."""
    command = [sys.executable, __file__, *arguments, "--wait"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def measure_all(wanted: list[list[str]], seconds: float) -> None:
    """Runs rows one after another, as long as there is time."""
    end = time.monotonic() + seconds
    following = begin(wanted[0])
    for i, arguments in enumerate(wanted):
        process, last = following, i + 1 == len(wanted)
        following = process if last else begin(wanted[i + 1])
        try:
            process.communicate("go\n", timeout=max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{' '.join(arguments)}: no time left", flush=True)
            for child in {process, following}:
                child.kill()
                child.wait()
            return


def wait(row: str) -> None:
    """Imports what a row needs, and waits for its turn."""
    if row.startswith("torch"):
        import torch.nn.attention.flex_attention  # noqa: F401
    else:
        import optax  # noqa: F401

        import llama  # noqa: F401
    sys.stdin.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", nargs="?", choices=list(ROWS))
    parser.add_argument("--split", action="store_true", help="print what `explain` measures")
    parser.add_argument("--every", action="store_true", help="both heads and states of each row")
    parser.add_argument("--seconds", type=float, default=1800, help="for all rows together")
    parser.add_argument("--wait", action="store_true", help="begin after a line of input")
    for field in dataclasses.fields(Setting):
        default: Any = field.default
        kind = type(default) if not isinstance(default, bool) else lambda x: x == "True"
        parser.add_argument(f"--{field.name}", type=kind, default=default)
    options = vars(parser.parse_args())
    row, split, every, seconds, waits = (
        options.pop(name) for name in ("row", "split", "every", "seconds", "wait")
    )
    if row is None:
        print(heading(), flush=True)
        measure_all(rows(every), seconds)
        return
    if waits:
        wait(row)
    setting = Setting(**options)
    print(told(row, setting, ROWS[row](setting, split)), flush=True)


if __name__ == "__main__":
    main()
