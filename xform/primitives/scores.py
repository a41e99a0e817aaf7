"""What is added to a score and done to it, as values: scores that are called, chained and moved.

A score is a scalar function `score(s, b, h, q_idx, kv_idx) -> s` of a scaled product `q . k` and
where it stands. Any such Python function will do; the objects here add `>>`, which chains them in
the order in which they are written (with plain functions on either side), `shift` and `slice`, a
readable `repr`, and numbers that may be traced arrays. A score is a pytree, so that it can be a
part of a model's parameters; all its floating arrays have exact gradients:

    grads = jax.grad(lambda bias: loss(flex_attention(q, k, v, score_mod=bias)))(t5_bias(table))
"""

import math
from collections.abc import Callable
from dataclasses import field

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from xform.primitives._objects import Mod, Moved, known, misfit, static, variant

type ScoreMod = Callable[[ArrayLike, ArrayLike, ArrayLike, ArrayLike, ArrayLike], ArrayLike]
"""`score(s, b, h, q_idx, kv_idx) -> s`, a score object or a plain function, on scalars."""


class Score(Mod):
    """What all scores share: `>>`, `shift` and `slice`, the printed form."""

    def __call__(self, s, b, h, q_idx, kv_idx) -> ArrayLike:
        raise NotImplementedError(f"`{type(self).__name__}` is a score without a `__call__`.")

    def __rshift__(self, other: ScoreMod) -> "Score":
        return _chain(self, as_score(other))

    def __rrshift__(self, other: ScoreMod) -> "Score":
        return _chain(as_score(other), self)

    @property
    def _at(self):
        return _moved


@variant
class _moved(Moved, Score):
    def __call__(self, s, b, h, q_idx, kv_idx):
        return self._called((s,), b, h, q_idx, kv_idx)


@variant
class _chain(Score):
    first: Score
    second: Score

    is_compound = True

    def __call__(self, s, b, h, q_idx, kv_idx):
        return self.second(self.first(s, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    def __repr__(self):
        return f"{self.first!r} >> {self.second!r}"


@variant
class _function(Score):
    f: ScoreMod

    def __call__(self, s, b, h, q_idx, kv_idx):
        return self.f(s, b, h, q_idx, kv_idx)

    def __repr__(self):
        return getattr(self.f, "__name__", repr(self.f))


def as_score(x: ScoreMod) -> Score:
    """Returns a plain function as a score object; one that is a score object, as it is.

    Raises:
      TypeError: on what is no function of a score.

    >>> (as_score(lambda s, b, h, q_idx, kv_idx: 2 * s) >> softcap(5.0))(0.0, 0, 0, 0, 0)
    Array(0., dtype=float32, weak_type=True)
    """
    if isinstance(x, Score):
        return x
    if isinstance(x, type):
        raise TypeError(f"`{x.__name__}` is a class: call it, `{x.__name__}(...)`.")
    if callable(x) and not isinstance(x, Mod):
        return _function(x)
    raise TypeError(
        "a score is chained with scores and with functions of `(s, b, h, q_idx, kv_idx)`, not with "
        f"{type(x).__name__}: of an array of biases, make one: `pair_bias(array)`."
    )


@variant
class softcap(Score):
    """`cap tanh(s / cap)`: scores stay between minus and plus `cap`, as in Gemma 2.

    Args:
        cap: a positive number; a scalar, or `[H]`.
        rtol: how far its tanh may be off, relative, beside 1e-6 absolute. From 5e-4 on, kernels
          take the GPU's own instruction, which is off by as much and is a good deal faster;
          elsewhere it is exact.

    >>> float(softcap(2.0)(100.0, 0, 0, 0, 0))
    2.0
    """

    cap: ArrayLike
    rtol: float | None = None

    positive = ("cap",)

    def __call__(self, s, b, h, q_idx, kv_idx):
        cap = _of_head("softcap(cap)", self.cap, h)
        # Of a score, absolute errors count: that is what `exp` makes relative ones of.
        allowed = lax.Tolerance(atol=1e-6, rtol=self.rtol or 0.0)
        return cap * lax.tanh(jnp.asarray(s / cap), accuracy=allowed)

    def misfits(self, shape):
        return misfit("softcap(cap)", self.cap, (), shape.h)


@variant
class temperature(Score):
    """`s / t`: with a learned number for each head, heads learn how sharply they look.

    Args:
        t: a positive number; a scalar, or `[H]`.

    >>> float(temperature(jnp.array([1.0, 4.0]))(2.0, 0, 1, 0, 0))
    0.5
    """

    t: ArrayLike

    positive = ("t",)

    def __call__(self, s, b, h, q_idx, kv_idx):
        return s / _of_head("temperature(t)", self.t, h)

    def misfits(self, shape):
        return misfit("temperature(t)", self.t, (), shape.h)


@variant
class alibi(Score):
    """`s - slope |q_idx - kv_idx|`: the further away, the less.

    Press et al., arXiv:2108.12409, for both directions; under a causal mask it is theirs.

    Args:
        slopes: `[H]`, one for each query head; `alibi.of(heads)` has those of the paper.

    >>> float(alibi(jnp.array([0.5, 0.25]))(1.0, 0, 1, 8, 4))
    0.0
    """

    slopes: ArrayLike

    @classmethod
    def of(cls, heads: int) -> "alibi":
        """Returns the slopes of the paper, and of its code for numbers that are no power of two.

        >>> alibi.of(3).slopes.tolist()
        [0.0625, 0.00390625, 0.25]
        """
        heads = static("alibi.of(heads)", heads)
        power = 2 ** int(math.log2(max(1, heads)))
        series = lambda n: 2.0 ** (-8 / n * np.arange(1, n + 1))
        return cls(jnp.asarray([*series(power), *series(2 * power)[::2]][:heads], jnp.float32))

    def __call__(self, s, b, h, q_idx, kv_idx):
        slope = _of_head("alibi(slopes)", self.slopes, h)
        return s - slope * jnp.abs(q_idx - kv_idx)

    def misfits(self, shape):
        return misfit("alibi(slopes)", self.slopes, (), shape.h)


@variant
class relative_bias(Score):
    """`s + table[kv_idx - q_idx]`: a learned number for each distance, in both directions.

    Args:
        table: `[2 R + 1]`, or `[H, 2 R + 1]`: entry `R + d` is that of keys `d` after the query.
            What is further away than R counts as R.

    >>> bias = relative_bias(jnp.array([10.0, 20.0, 30.0]))
    >>> [float(bias(0.0, 0, 0, 4, k)) for k in (0, 3, 4, 5)]
    [10.0, 10.0, 20.0, 30.0]
    """

    table: ArrayLike

    def __call__(self, s, b, h, q_idx, kv_idx):
        table = _table("relative_bias(table)", self.table, h)
        reach = table.shape[0] // 2
        return s + table[jnp.clip(kv_idx - q_idx, -reach, reach) + reach]

    def misfits(self, shape):
        wrong = misfit("relative_bias(table)", self.table, [None], shape.h)
        size = (np.shape(self.table) or (1,))[-1]  # a table of no dimension is refused when called
        odd = f"`relative_bias(table)` has {size} entries, which must be 2 R + 1 for a reach of R"
        return wrong if size % 2 else [*wrong, odd]


@variant
class t5_bias(Score):
    """`s + table[bucket]`: T5's bias, exact for near keys, logarithmic in the distance of others.

    Raffel et al., arXiv:1910.10683. T5 does not scale its products: give it `scale=1.0`.

    Args:
        table: `[N]`, or `[H,N]`: the bias of each of N buckets.
        bidirectional: whether keys after the query have the upper half of the buckets; else they
            count as the query's own, as in a decoder.
        max_distance: from here on, all keys are in the last bucket; more than half the buckets that
            a direction has, which are exact.

    >>> bias = t5_bias(jnp.arange(32.0), bidirectional=False)
    >>> [float(bias(0.0, 0, 0, 200, k)) for k in (200, 185, 184, 170, 0)]
    [0.0, 15.0, 16.0, 20.0, 31.0]
    """

    table: ArrayLike
    bidirectional: ArrayLike = field(default=True, kw_only=True)
    max_distance: ArrayLike = field(default=128, kw_only=True)

    positive = ("max_distance",)

    def __call__(self, s, b, h, q_idx, kv_idx):
        table = _table("t5_bias(table)", self.table, h)
        return s + table[self.bucket(kv_idx - q_idx, table.shape[0])]

    def bucket(self, distance, buckets):
        """The bucket of a key that lies `distance` after its query."""
        is_two_sided = self.bidirectional
        pick = lambda yes, no: jnp.where(is_two_sided, yes, no)
        if known(is_two_sided):
            pick = lambda yes, no: yes if is_two_sided else no
        first = pick(jnp.where(distance > 0, buckets // 2, 0), 0)
        distance = pick(jnp.abs(distance), jnp.maximum(-distance, 0))
        buckets = pick(buckets // 2, buckets)
        exact = buckets // 2
        # T5 computes in float32, and so where a bucket ends is decided there.
        far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
        far = far / self._reach(exact) * (buckets - exact)
        far = jnp.minimum(exact + far.astype(jnp.int32), buckets - 1)
        return first + jnp.where(distance < exact, distance, far)

    def _reach(self, exact):
        """The logarithm of how much further the last bucket begins than the first inexact one."""
        if not known(self.max_distance) or not known(exact):
            return jnp.log(self.max_distance / exact)
        if not 0 < exact < self.max_distance:
            raise ValueError(
                f"`t5_bias(max_distance={self.max_distance})`, of whose buckets the first {exact} "
                "of a direction are exact: needed is a larger distance, and two buckets at least "
                "for each direction."
            )
        return math.log(self.max_distance / exact)

    def misfits(self, shape):
        return misfit("t5_bias(table)", self.table, [None], shape.h) + super().misfits(shape)


@variant
class pair_bias(Score):
    """`s + bias[q_idx, kv_idx]`: a number for each pair, as AlphaFold's pair representation gives.

    Args:
        bias: `[T,S]`, `[H,T,S]` or `[B,H,T,S]`; B and H may be 1, for one that all share.

    >>> float(pair_bias(jnp.arange(6.0).reshape(2, 3))(1.0, 0, 0, 1, 2))
    6.0
    """

    bias: ArrayLike

    def __call__(self, s, b, h, q_idx, kv_idx):
        bias = jnp.asarray(self.bias)
        if not 2 <= bias.ndim <= 4:
            raise ValueError(
                f"`pair_bias(bias)` has shape {list(bias.shape)}; it must be [T,S], [H,T,S] or "
                "[B,H,T,S]."
            )
        lead = [0 if n == 1 else i for n, i in zip(bias.shape[:-2][::-1], (h, b), strict=False)]
        return s + bias[(*reversed(lead), q_idx, kv_idx)]

    def misfits(self, shape):
        found = np.shape(self.bias)
        needed = list(shape)[4 - len(found) : 4]
        shared = [None if n == 1 and len(found) - d > 2 else needed[d] for d, n in enumerate(found)]
        return misfit("pair_bias(bias)", self.bias, shared, None) if 2 <= len(found) <= 4 else []


def _of_head(name: str, x: ArrayLike, h):
    """What head `h` has of a number, or of one for each head."""
    x = jnp.asarray(x)
    if x.ndim > 1:
        raise ValueError(f"`{name}` has shape {list(x.shape)}; it must be a scalar or [H].")
    return x[h] if x.ndim else x


def _table(name: str, x: ArrayLike, h):
    """What head `h` has of a table `[N]` or `[H,N]`."""
    x = jnp.asarray(x)
    if x.ndim not in (1, 2):
        raise ValueError(f"`{name}` has shape {list(x.shape)}; it must be [N] or [H,N].")
    return x[h] if x.ndim > 1 else x
