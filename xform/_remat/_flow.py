"""Maximum flow and minimum cut, exactly: integers of any size, the same answer every time.

Dinic's algorithm (1970): while a path is left, number the nodes by their distance from the source
and fill all shortest paths at once. A program's graph has a few edges a node and few distances, for
which it takes far fewer steps than its bound, nodes² · edges. Of several minimum cuts the one
nearest to the sink is taken.
"""

from __future__ import annotations

from collections import deque

SOURCE, SINK = 0, 1


class Network:
    """A directed graph with capacities, from `SOURCE` to `SINK`.

    >>> network = Network()
    >>> middle = network.node()
    >>> network.edge(SOURCE, middle, 3)
    >>> network.edge(middle, SINK, 2)
    >>> network.cut()
    (2, frozenset({1}))
    """

    def __init__(self):
        # The edges that leave each node; edge i and its reverse i ^ 1 are made together.
        self.leaving: list[list[int]] = [[], []]
        self.head: list[int] = []
        self.left: list[int] = []

    def node(self) -> int:
        """Makes a node; returns its number."""
        self.leaving.append([])
        return len(self.leaving) - 1

    def edge(self, tail: int, head: int, capacity: int) -> None:
        """Makes an edge that `capacity` can flow through."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.leaving[start].append(len(self.head))
            self.head.append(end)
            self.left.append(room)

    def cut(self) -> tuple[int, frozenset[int]]:
        """Returns the largest flow, and the nodes on the sink's side of a minimum cut."""
        total = 0
        while (level := self._levels())[SINK] is not None:
            at = [0] * len(self.leaving)
            while pushed := self._push(level, at):
                total += pushed
        return total, self._sink_side()

    def _levels(self) -> list[int | None]:
        """The distance of each node from the source, along edges with room left."""
        level: list[int | None] = [None] * len(self.leaving)
        level[SOURCE] = 0
        queue = deque([SOURCE])
        while queue:
            node = queue.popleft()
            for edge in self.leaving[node]:
                if self.left[edge] and level[self.head[edge]] is None:
                    level[self.head[edge]] = level[node] + 1  # pyright: ignore[reportOptionalOperand]
                    queue.append(self.head[edge])
        return level

    def _push(self, level: list, at: list[int]) -> int:
        """Sends what one shortest path lets through; 0 if there is none left.

        `at` are the edges that each node has got to: what leads nowhere is not tried again.
        """
        path: list[int] = []
        node = SOURCE
        while node != SINK:
            edges = self.leaving[node]
            while at[node] < len(edges):
                edge = edges[at[node]]
                if self.left[edge] and level[self.head[edge]] == level[node] + 1:
                    path.append(edge)
                    node = self.head[edge]
                    break
                at[node] += 1
            else:
                if node == SOURCE:
                    return 0
                node = self.head[path.pop() ^ 1]
                at[node] += 1
        room = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= room
            self.left[edge ^ 1] += room
        return room

    def _sink_side(self) -> frozenset[int]:
        """The nodes from which more could flow into the sink."""
        found, queue = {SINK}, deque([SINK])
        while queue:
            for edge in self.leaving[queue.popleft()]:
                tail = self.head[edge]
                if self.left[edge ^ 1] and tail not in found:
                    found.add(tail)
                    queue.append(tail)
        return frozenset(found)
