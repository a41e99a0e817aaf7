"""One part of a step computed twice, on different replicas: a check against silent corruption.

A processor that computes wrongly now and then says nothing, and its numbers spread to all others in
the next sum. So now and then the same rows are given to two replicas along the data axis, and their
gradients are compared bit by bit. The program is that of training itself, in any layout: all
replicas compute the rows of one, and labels count in one of them. What the others add to sums is
zero, so that no order of adding changes a bit, and the two must agree.

It takes two gradients, and memory for both. What is wrong in rare moments only is found when it
happens there; what is wrong on some values is found once they come by, each replica in turn.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from xform.train.data import NO_LABEL, Rows


class Corruption(ArithmeticError):
    """Two replicas made different numbers of the same rows by the same program."""


def check(gradients: Callable[[Rows], PyTree], rows: Rows, replicas: int, step: int) -> None:
    """Raises if the next two replicas in turn differ on a part of the rows.

    Args:
      gradients: Returns the gradients, or what else is to be compared, of rows of the host.
      rows: The rows of a step, which replicas share in order and equally.
      replicas: How many there are, at least 2.
      step: The step, which says whose turn it is.

    Raises:
      Corruption: They differ; it names leaves and replicas, and where a third one judges between
        them, which of the two is wrong.

    >>> rows = Rows(*[np.arange(8).reshape(4, 2).astype(np.int32)] * 3)
    >>> check(lambda rows: rows.labels[rows.labels != -1], rows, replicas=2, step=7)
    """
    first = step % replicas
    second = (first + 1) % replicas
    of = lambda replica: gradients(only_on(rows, first, replica, replicas))
    one, two = of(first), of(second)
    wrong = differences(one, two)
    if not wrong:
        return
    words = "; ".join(f"`{leaf}` in {count}" for leaf, count in list(wrong.items())[:8])
    who = f"which of replicas {first} and {second} is wrong, only a third could tell"
    if replicas > 2:
        third = of((first + 2) % replicas)
        votes = {first: not differences(two, third), second: not differences(one, third)}
        wrong_ones = [replica for replica, outvoted in votes.items() if outvoted]
        who = (
            f"replica {wrong_ones[0]} is wrong, by a third one's word"
            if len(wrong_ones) == 1
            else f"of replicas {first} and {second} and a third one, no two agree as they should"
        )
    raise Corruption(
        f"step {step}: replicas {first} and {second} differ on the same rows: {words} places; "
        f"{who}. Take its machine out, and go on from a checkpoint before."
    )


def only_on(rows: Rows, part: int, replica: int, replicas: int) -> Rows:
    """Returns rows of which all replicas have one's part, and one has its labels.

    >>> rows = Rows(*[np.arange(8).reshape(4, 2).astype(np.int32)] * 3)
    >>> only_on(rows, 0, replica=1, replicas=2).labels.tolist()
    [[-1, -1], [-1, -1], [0, 1], [2, 3]]
    """
    size = len(rows.tokens) // replicas
    own = lambda x: np.tile(x[part * size : (part + 1) * size], (replicas, 1))
    tokens, ids, labels = (own(x) for x in rows)
    there = np.arange(len(labels)) // size == replica
    return Rows(tokens, ids, np.where(there[:, None], labels, NO_LABEL).astype(np.int32))


def differences(one: PyTree, two: PyTree) -> Mapping[str, int]:
    """Returns in how many places leaves differ in their bits, by path; zeros have no sign.

    >>> differences({"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([1.0, 2.5])})
    {'a': 1}
    """
    counts = _count(one, two)
    named = (
        (keystr(p, simple=True, separator="/"), n) for p, n in jax.tree.leaves_with_path(counts)
    )
    return {name: int(n) for name, n in named if n}


@jax.jit
def _count(one: PyTree, two: PyTree) -> PyTree:
    def differ(a, b):
        same = (a == b) | ((a != a) & (b != b))
        return jnp.sum(~same, dtype=jnp.int32)

    return jax.tree.map(differ, one, two)
