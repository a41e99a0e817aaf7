"""The programs whose communication is kept in `golden.json`, compiled for H200s.

`python -m tests.sharding.golden` writes the file anew; the difference then shows what a change to a
rule, or a new version of JAX, does to what devices say to each other and to what hides it.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import P

from xform.sharding import Audit, TensorParallel, audit, data, fsdp, loss

FILE = Path(__file__).parent / "golden.json"
BF16 = jnp.bfloat16
S = jax.ShapeDtypeStruct


def feed_forward(n: int) -> Audit:
    """A feed-forward block and its gradients, positions split over tp, products in rings."""
    tokens, width, units = 4096, 4096, 14336
    tp = TensorParallel("tp", sequence=True, overlap="ring")
    specs = (P(None, "tp"), P(None, "tp"), P("tp"), P(None, "tp"))

    def block(x, up, down):
        (h,) = tp.column(x, up)
        return tp.row(jnp.tanh(h), down)

    def forward_and_backward(x, up, down, dy):
        y, back = jax.vjp(block, x, up, down)
        return y, back(dy)

    out = (P(None, "tp"), (P(None, "tp"), P(None, "tp"), P("tp")))
    f = lambda *args: jax.shard_map(forward_and_backward, in_specs=specs, out_specs=out)(*args)
    x = S((1, tokens, width), BF16)
    args = (x, S((width, units), BF16), S((units, width), BF16), x)
    return audit(f, args, {"tp": n}, specs=specs)


def layers(ahead: int, unroll: int | None = None) -> Audit:
    """Eight fully sharded layers over eight devices, forward and backward."""
    width, units, tokens, n = 2048, 8192, 32_768, 8
    whole = {"up": P(None, None, "dp"), "down": P(None, "dp")}
    of_layer = {name: P(*spec[1:]) for name, spec in whole.items()}
    gather = partial(data.gather, specs=of_layer, axis="dp")

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def total(stack, x):
        y = fsdp.scan_layers(layer, x, stack, gather=gather, ahead=ahead, unroll=unroll)
        return jnp.sum(y.astype(jnp.float32)), jnp.sum(x[:, 0] < jnp.inf)

    step = data.value_and_grad(total, lambda stack: stack, "dp")
    specs = (whole, P("dp"))
    f = lambda *args: jax.shard_map(step, in_specs=specs, out_specs=(P(), whole))(*args)
    stack = {"up": S((8, width, units), BF16), "down": S((8, units, width), BF16)}
    return audit(f, (stack, S((tokens, width), BF16)), {"dp": n}, specs=specs)


def microbatches(parts: int) -> Audit:
    """Whole parameters over dp, gradients of several microbatches summed over devices once."""
    width, rows, n = 1024, 256, 8

    def of_rows(params, x):
        h, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.sum(h * params["scale"][None]), jnp.sum(x[:, 0] > -1e9)

    enter = partial(data.per_device, axes="dp")
    step = data.value_and_grad(of_rows, enter, "dp", microbatches=parts)
    specs = (P(), P("dp"))
    f = lambda *args: jax.shard_map(step, in_specs=specs, out_specs=(P(), P()))(*args)
    params = {"layers": S((4, width, width), jnp.float32), "scale": S((width,), jnp.float32)}
    args = (params, S((rows * n, width), jnp.float32))
    return audit(f, args, {"dp": n}, specs=specs, replicated="0/*")


def vocabulary(n: int) -> Audit:
    """The loss over a vocabulary of 128,256 entries that tp splits, and its gradients."""
    tokens, width, codes = 2048, 1024, 128_256
    tp = TensorParallel("tp")

    def mean(hidden, weight, labels):
        each, _ = loss.cross_entropy(tp.enter(hidden), weight, labels, tp)
        return each.sum() / tokens

    specs = (P(), P(None, "tp"), P())
    on_each = lambda *args: jax.shard_map(mean, in_specs=specs, out_specs=P())(*args)
    f = jax.value_and_grad(on_each, (0, 1))
    args = (S((1, tokens, width), BF16), S((width, codes), BF16), S((1, tokens), jnp.int32))
    return audit(f, args, {"tp": n}, specs=specs)


PROGRAMS: dict[str, Callable[[], Audit]] = {
    "feed forward, tp=2": lambda: feed_forward(2),
    "feed forward, tp=4": lambda: feed_forward(4),
    "feed forward, tp=8": lambda: feed_forward(8),
    "layers, 1 ahead": lambda: layers(1),
    "layers, 0 ahead": lambda: layers(0, unroll=1),
    "microbatches, 1": lambda: microbatches(1),
    "microbatches, 4": lambda: microbatches(4),
    "vocabulary, tp=8": lambda: vocabulary(8),
}


def main() -> int:
    """Writes the file."""
    found: dict = {"jax": jax.__version__}
    for name, compiled in PROGRAMS.items():
        report = compiled()
        sys.stdout.write(f"{name}\n{report}\n\n")
        found[name] = report.counts()
    FILE.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
