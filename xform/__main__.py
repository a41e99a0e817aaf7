"""`python -m xform`: what is installed, what it runs on, and whether it works there, to report.

Each check compares with something that can't be wrong in the same way: attention with the dense
reference in float64, under the budget of the tests (at most twice the error of the dense program at
the same precision, and one rounding); sums over devices with whole numbers.
"""

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from xform._compat import platform_log
from xform.jaxpr import rewrite
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents
from xform.sharding.mesh import make_mesh, shardings

T, H, K, D = 300, 4, 2, 32  # more than one tile, and no multiple of any


def _inputs(dtype) -> tuple:
    """Queries, keys, values and the slopes that a score mod reads."""
    rng = np.random.default_rng(0)
    heads = (rng.normal(size=(1, T, n, D)) for n in (H, K, K))
    return tuple(jnp.asarray(x, dtype) for x in (*heads, 2.0 ** -np.arange(1, H + 1)))


def _attend(implementation: str | None, q, k, v, slopes):
    ids = jnp.arange(T) // 130
    alibi = lambda score, b, h, i, j: score - slopes[h] * (i - j)
    mask = causal() & documents(ids)
    return flex_attention(q, k, v, score_mod=alibi, mask_mod=mask, implementation=implementation)


def _with_gradients(implementation: str | None, *args):
    def loss(*args):
        out = _attend(implementation, *args)
        return jnp.sin(out).sum(), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*args)
    return out, gradients


def _against_float64(f: Callable, dtype) -> str:
    """Raises if a result of xform's is too far from the truth; returns how far it is."""
    args = _inputs(dtype)
    found = jax.jit(f, static_argnums=0)(None, *args)
    # What it is compared with runs once: XLA's optimiser would take longer than the program.
    dense = jax.jit(partial(f, "reference"), compiler_options={"xla_backend_optimization_level": 0})
    judge = dense(*args)
    with jax.enable_x64(True):
        truth = dense(*(np.asarray(x, np.float64) for x in args))
    worst = 0.0
    for x, other, true in zip(*map(jax.tree.leaves, (found, judge, truth)), strict=True):
        error, allowed = _size(x, true), 2 * _size(other, true)
        allowed += float(jnp.finfo(x.dtype).eps) * _size(true, 0)
        worst = max(worst, error / allowed)
        if not error <= allowed:
            raise AssertionError(f"off by {error:.1e}, allowed are {allowed:.1e}")
    return f"{worst:.0%} of the error allowed"


def _size(x, origin) -> float:
    """Root mean square of the distance."""
    return float(np.sqrt(np.square(np.asarray(x, np.float64) - np.asarray(origin)).mean()))


def _same_bits() -> str:
    """Raises if gradients differ from one run to the next."""
    step = jax.jit(_with_gradients, static_argnums=0)
    one, two = (step(None, *_inputs(jnp.float32)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    return "output and gradients, twice"


def _rewritten() -> str:
    """Raises if a rule of the user's does not reach into a scan."""
    f = lambda x: jax.lax.scan(lambda c, y: (c + jnp.sin(y), c), 0.0, x)[0]
    x = jnp.arange(5.0)
    found = jax.jit(rewrite(f, {"sin": lambda x, **_: jnp.cos(x)}))(x)
    np.testing.assert_allclose(found, np.cos(np.arange(5.0)).sum(), rtol=1e-6)
    return "sin to cos, inside a scan"


def _summed() -> str:
    """Raises if devices don't find the same sum of what each of them has."""
    mesh = make_mesh(dp=jax.local_device_count(), devices=jax.local_devices())
    n = mesh.size
    x = jax.device_put(jnp.arange(4 * n), shardings(mesh, P("dp")))
    body = lambda x: jax.lax.psum(x, "dp")
    total = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))(x)
    np.testing.assert_array_equal(total, np.arange(4 * n).reshape(n, 4).sum(0))
    return f"over {n} device{'s' * (n > 1)}"


CHECKS: dict[str, Callable[[], str]] = {
    "attention and gradients": lambda: _against_float64(_with_gradients, jnp.float32),
    "attention in bfloat16": lambda: _against_float64(_attend, jnp.bfloat16),
    "the same bits again": _same_bits,
    "a program rewritten": _rewritten,
    "a sum over devices": _summed,
}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collects in a line each what JAX logs with a traceback: platforms that can't be used."""
    found: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        found.append(record.getMessage() + (f": {_in_a_line(error)}" if error else ""))
        return False

    platform_log.addFilter(collect)
    try:
        yield found
    finally:
        platform_log.removeFilter(collect)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _no_devices(why: list[str]) -> str:
    """Says that nothing can run, why, and what to try."""
    asked = os.environ.get("JAX_PLATFORMS")
    cure = "install the JAX of this machine's devices, as `jax[cuda13]`, and look at their driver"
    if asked:
        cure = f"JAX_PLATFORMS={asked} asks for it: unset that, or try JAX_PLATFORMS=cpu; or {cure}"
    return f"no devices: {'; '.join(why)}\nto go on: {cure}\nno check could run"


def main() -> int:
    """Prints the report; returns the number of checks that failed."""
    packages = ("xform-jax", "jax", "jaxlib", "numpy")
    print(*(f"{package} {_version(package)}" for package in packages), sep=", ")
    print(f"python {platform.python_version()} on {platform.platform()}")
    with _logged() as unused:
        try:
            devices = jax.devices()
        except Exception as error:  # whatever it is, it belongs into the report
            print(_no_devices([*unused, _in_a_line(error)]))
            return len(CHECKS)
    print("".join(f"not used: {why}\n" for why in unused), end="")
    for kind in sorted({device.device_kind for device in devices}):
        count = sum(device.device_kind == kind for device in devices)
        print(f"{jax.default_backend()}: {count} × {kind}")
    failed = 0
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            result = f"pass  {check()}"
        except Exception as error:  # whatever it is, it belongs into the report
            failed += 1
            result = f"FAIL  {type(error).__name__}: {error}"
        print(f"{name:24} {time.perf_counter() - start:4.1f} s  {result}", flush=True)
    print("all checks pass" if not failed else f"{failed} of {len(CHECKS)} checks FAIL")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
