"""What threads hand to each other by name: who takes a value waits until another has put it."""

from __future__ import annotations

import threading
from typing import Any


class Closed(Exception):
    """What is waited for does not come any more."""


class Mailbox:
    """Values by name, each put once and taken once."""

    def __init__(self):
        self._values: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._open = True

    def put(self, name: Any, value: Any) -> None:
        """Leaves a value for whoever takes it."""
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def take(self, name: Any) -> Any:
        """Returns a value and forgets it; raises `Closed` where none comes any more."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._values or not self._open)
            if name not in self._values:
                raise Closed
            return self._values.pop(name)

    def close(self) -> None:
        """Lets nobody wait any longer."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    @property
    def values(self) -> dict[Any, Any]:
        """What nobody has taken yet."""
        with self._changed:
            return dict(self._values)
