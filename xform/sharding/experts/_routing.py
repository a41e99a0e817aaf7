"""Which experts a token goes to, with what weights, and how evenly all are used.

A router is one matrix. Its products and all that is made of them are float32 whatever the stream
is (float64 for float64), under `xform.precision` too: a rounded score is another expert.

    scores    softmax(logits), or sigmoid(logits)
    experts   the k largest scores (+ bias, which chooses and does not weigh: arXiv:2408.15664)
    weights   their scores, normalised to sum 1 or not, times `scale`

Normalised weights are made of logits, as exact where all scores underflow. Equal scores go to the
expert of the lower number. A token with a logit that is not a number still has k experts, and NaN
for weights: no other token becomes NaN of it. But with a capacity or a bound it takes places as any
other does, which others may then lack.

How evenly experts are used is a matter of sums over tokens (`Load`), which add up over devices,
microbatches or rows; a loss is made of the sums of all (`total`), never a mean of devices' losses:
the mean of products is not the product of means.

    balance   E · Σ_e (share of choices that fell on e) · (mean score of e)      1 if all are even
    z         mean of logsumexp(logits)²

Sources: Switch (Fedus et al., arXiv:2101.03961) for the balance, with DeepSeek-V3's normalised
scores where they are sigmoids (arXiv:2412.19437); ST-MoE (arXiv:2202.08906) for z.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer

from xform._compat import varying_axes
from xform.sharding._declare import declare
from xform.sharding.data import per_device

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """What is static about where tokens go.

    Attributes:
      experts: How many there are, E, over all devices.
      top_k: How many a token goes to, k.
      score: What a router's logits are made into: "softmax" or "sigmoid".
      normalise: Whether a token's weights sum to 1; by default where k > 1. With k = 1 they would
        all be 1, and the loss would teach the router nothing: there the weight is the score, as in
        Switch.
      scale: What weights are multiplied by.
      capacity: None: no choice is dropped. Else each expert takes `ceil(capacity · k · g / E)`
        choices of a group of g tokens, and drops the rest: first choices before second ones, and
        of these the tokens that come first.
      group: How many successive positions of a row are a group; by default all that a device has.
        What is dropped depends on groups alone: no mesh that leaves them whole changes it.
      bound: Without a capacity, how many choices a device may send to another, as a multiple of an
        even share; by default as many as there can be. A token beyond it becomes NaN.

    Raises:
      TypeError: Lists sizes that are no whole numbers.
      ValueError: Lists all that makes no sense.

    >>> Routing(experts=8, top_k=2, capacity=1.25, group=64).places(64)
    20
    >>> Routing(8, 2).sent(64, devices=4), Routing(8, 2, bound=1.5).sent(64, devices=4)
    (128, 48)
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool | None = None
    scale: float = 1.0
    capacity: float | None = None
    group: int | None = None
    bound: float | None = None

    def __post_init__(self):
        sizes = {"experts": self.experts, "top_k": self.top_k}
        sizes |= {} if self.group is None else {"group": self.group}
        wrong = [
            f"`{name}` is {size!r}; needed is a whole number"
            for name, size in sizes.items()
            if isinstance(size, bool) or not isinstance(size, Integral)
        ]
        if wrong:
            raise TypeError(f"Routing: {'; '.join(wrong)}.")
        if self.experts < 1:
            wrong.append(f"`experts` is {self.experts}; needed is at least 1")
        if not 1 <= self.top_k <= max(1, self.experts):
            wrong.append(
                f"`top_k` is {self.top_k}; needed is 1 to {max(1, self.experts)}, since a token "
                "goes to an expert once"
            )
        if self.normalise and self.top_k == 1:
            wrong.append(
                "`normalise` of one weight is always 1, from which a router learns nothing: leave "
                "it out, or set `top_k` above 1"
            )
        if self.score not in SCORES:
            wrong.append(f"`score` is {self.score!r}; there is {' and '.join(map(repr, SCORES))}")
        if not 0 < self.scale < math.inf:
            wrong.append(f"`scale` is {self.scale}; needed is a number above 0")
        for name in ("capacity", "bound"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                wrong.append(f"`{name}` is {value}; needed is a number above 0, or None")
        if self.group is not None and self.group < 1:
            wrong.append(f"`group` is {self.group}; needed is at least 1, or None")
        if self.group is not None and self.capacity is None:
            wrong.append("`group` is of a `capacity`, and there is none: set that too")
        if self.bound is not None and self.capacity is not None:
            wrong.append("`bound` is of routing that drops nothing: leave it or `capacity` out")
        if wrong:
            raise ValueError(f"Routing: {'; '.join(wrong)}.")

    @property
    def normalised(self) -> bool:
        """Whether a token's weights sum to 1; see `normalise`."""
        return self.top_k > 1 if self.normalise is None else self.normalise

    def places(self, group: int) -> int:
        """Returns how many choices of so many tokens an expert takes; see `capacity`."""
        share = self.top_k * group / self.experts
        return group if self.capacity is None else min(group, math.ceil(self.capacity * share))

    def sent(self, tokens: int, devices: int) -> int:
        """Returns how many choices of so many tokens a device can send to one; see `bound`."""
        most = tokens * min(self.top_k, self.experts // devices)
        share = self.top_k * tokens / devices
        return most if self.bound is None else min(most, math.ceil(self.bound * share))


class Routes(NamedTuple):
    """Where tokens go. One's own router makes it as `route` does.

    Attributes:
      experts: The k experts of each token, all different.
      weights: What their outputs count.
      logits: What was said of all experts, float32.
    """

    experts: Integer[Array, "... k"]
    weights: Float[Array, "... k"]
    logits: Float[Array, "... E"]


class Load(NamedTuple):
    """Sums over tokens. Whole numbers are exact to 2²⁴.

    Attributes:
      chosen: How often each expert was chosen.
      scores: The sum of its scores, which are 1 in all for each token.
      squares: The sum of squared log-sum-exps of logits.
      tokens: How many tokens.
      dropped: How many choices an expert had no place for.
    """

    chosen: Float[Array, "*layers E"]
    scores: Float[Array, "*layers E"]
    squares: Float[Array, "*layers"]
    tokens: Float[Array, "*layers"]
    dropped: Float[Array, "*layers"]

    @classmethod
    def none(cls, x: Array, experts: int, layers: int) -> "Load":
        """Returns that of no token, for so many layers, where loops over them begin.

        Args:
          x: The stream; the load is of as many devices as it.
          experts: How many there are.
          layers: How many layers.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        of_each, of_all = jnp.zeros((layers, experts), wide), jnp.zeros(layers, wide)
        load = cls(of_each, of_each, of_all, of_all, of_all)
        return per_device(load, tuple(sorted(varying_axes(x))))

    def then(self, load: "Load") -> "Load":
        """Returns these without the first layer, and another layer behind them."""
        return jax.tree.map(lambda all, one: jnp.concatenate([all[1:], one[None]]), self, load)


def route(
    x: Float[Array, "... M"],
    weight: Float[Array, "M E"],
    routing: Routing,
    bias: Float[Array, " E"] | None = None,
) -> Routes:
    """Returns where tokens go.

    Args:
      x: The tokens' stream.
      weight: The router's matrix.
      routing: How.
      bias: Added to scores to choose, and not to weigh; it has no gradient.

    >>> routes = route(jnp.eye(3), jnp.eye(3), Routing(experts=3, top_k=2))
    >>> routes.experts.tolist(), [f"{weight:.2f}" for weight in routes.weights[0]]
    ([[0, 1], [1, 0], [2, 0]], ['0.73', '0.27'])
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # An algorithm of its own: no matrix unit may round operands, and no policy of precision.
    algorithm = {4: "F32_F32_F32", 8: "F64_F64_F64"}[wide.itemsize]
    logits = lax.dot_general(
        x.astype(wide), weight.astype(wide), (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.DotAlgorithmPreset[algorithm],
    )  # fmt: skip
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[routing.score](logits)
    choice = scores if bias is None else scores + jnp.broadcast_to(bias, scores.shape)
    choice = jnp.where(jnp.isnan(choice), -jnp.inf, lax.stop_gradient(choice))
    _, experts = lax.top_k(choice, routing.top_k)
    chosen = jnp.take_along_axis(logits if routing.normalised else scores, experts, -1)
    weights = _shares(chosen, routing) if routing.normalised else chosen
    lost = jnp.any(jnp.isnan(logits), -1, keepdims=True)
    return Routes(experts, jnp.where(lost, jnp.nan, routing.scale * weights), logits)


def _shares(logits: Float[Array, "... E"], routing: Routing) -> Float[Array, "... E"]:
    """Scores as parts of their sum, which may underflow: the quotient's derivative then would."""
    return jax.nn.softmax(logits if routing.score == "softmax" else jax.nn.log_sigmoid(logits), -1)


def load_of(routes: Routes, routing: Routing) -> Load:
    """Returns how much the tokens of these routes ask of each expert; nothing is dropped yet.

    >>> routing = Routing(4, 2)
    >>> load = load_of(route(jnp.ones((6, 3)), jnp.ones((3, 4)), routing), routing)
    >>> load.chosen.tolist(), float(load.tokens)  # ties go to the first
    ([6.0, 6.0, 0.0, 0.0], 6.0)
    """
    logits = routes.logits.reshape(-1, routing.experts)
    lse = jax.nn.logsumexp(logits, -1)
    chosen = jnp.sum(counts(routes.experts.reshape(1, -1), routing.experts), 0)
    number = lambda n: per_device(jnp.array(n, lse.dtype), tuple(sorted(varying_axes(lse))))
    return Load(
        chosen=chosen.astype(lse.dtype),
        scores=jnp.sum(_shares(logits, routing), 0),
        squares=jnp.sum(lse**2),
        tokens=number(len(lse)),
        dropped=number(0),
    )


def counts(expert: Integer[Array, "G A"], experts: int) -> Integer[Array, "G E"]:
    """Returns how often each expert stands in each row."""
    is_it = expert[:, :, None] == jnp.arange(experts, dtype=expert.dtype)[None, None]
    return jnp.sum(is_it, 1, dtype=jnp.int32)


# ---- losses --------------------------------------------------------------------------------------


def total(load: Load) -> Load:
    """Returns the load of all devices, the same on all: one sum over the axes that it varies over.

    To be called inside `jax.shard_map`, outside of loops: loads of layers are summed at once.

    >>> routing = Routing(4, 2)
    >>> load = load_of(route(jnp.ones((6, 3)), jnp.ones((3, 4)), routing), routing)
    >>> float(total(load).tokens)  # on one device, the same
    6.0
    """
    axes = tuple(sorted(varying_axes(load.tokens)))
    with declare("experts.total", *axes):
        return lax.psum(load, axes) if axes else load


def balance_loss(load: Load) -> Float[Array, "*layers"]:
    """Returns how unevenly experts are used: 1 where they are used alike, E where one is alone.

    Its gradient is that of the scores: what was chosen has none.

    >>> even = Load(jnp.ones(4), jnp.ones(4), jnp.zeros(()), jnp.array(4.0), jnp.zeros(()))
    >>> alone = even._replace(chosen=4 * jnp.eye(4)[0], scores=4 * jnp.eye(4)[0])
    >>> float(balance_loss(even)), float(balance_loss(alone))
    (1.0, 4.0)
    """
    tokens = jnp.maximum(load.tokens, 1)[..., None]
    choices = jnp.maximum(jnp.sum(load.chosen, -1, keepdims=True), 1)
    share = lax.stop_gradient(load.chosen / choices)
    return load.chosen.shape[-1] * jnp.sum(share * load.scores / tokens, -1)


def z_loss(load: Load) -> Float[Array, "*layers"]:
    """Returns the mean square of the router's log-sum-exp, which keeps logits small.

    >>> load = Load(jnp.ones(2), jnp.ones(2), jnp.array(18.0), jnp.array(2.0), jnp.zeros(()))
    >>> float(z_loss(load))
    9.0
    """
    return load.squares / jnp.maximum(load.tokens, 1)


def auxiliary(load: Load, labels: Array, *, balance: float = 0.01, z: float = 0.001) -> Array:
    """Returns what to add to this device's sum of losses, for `data.value_and_grad`.

    The mean of all losses is then larger by `balance · Σ balance_loss + z · Σ z_loss`, sums over
    layers, each of the tokens of all devices: once, whatever the mesh. With microbatches it is each
    one's own, which counts as many times as that has labels: a mean of products over fewer tokens,
    so another number than that of the whole batch.

    Args:
      load: Of this device's tokens, by layer.
      labels: How many labels its sum of losses is over.
      balance: What the first counts.
      z: What the second counts.

    >>> load = load_of(route(jnp.ones((6, 3)), jnp.ones((3, 4)), Routing(4, 2)), Routing(4, 2))
    >>> float(auxiliary(load, jnp.array(6), balance=1.0, z=0.0))
    6.0
    """
    load = total(load)
    mean = balance * jnp.sum(balance_loss(load)) + z * jnp.sum(z_loss(load))
    with declare("experts.auxiliary", *(axes := tuple(sorted(varying_axes(labels))))):
        mean = per_device(mean, axes)
    return mean * labels.astype(mean.dtype)
