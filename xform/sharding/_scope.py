"""The name of a rule on everything that it runs, forward and backward."""

from collections.abc import Callable
from functools import wraps

import jax

PREFIX = "rule:"


def rule[F: Callable](name: str) -> Callable[[F], F]:
    """Puts `rule:name` on the operations of a function, so that a program says who wrote them.

    The name reaches the compiled program as part of each operation's `op_name`, and those of its
    derivative with it. Rules inside rules are separated by `/`; the innermost one is the author.

    Args:
      name: Module and function, such as `tensor.row`.
    """

    def named(f: F) -> F:
        @wraps(f)
        def call(*args, **kwargs):
            with jax.named_scope(PREFIX + name):
                return f(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return named
