"""Chunks dealt out to devices, so that none has more to do than the others.

Each device gets equally many. First the dearest go to who has the least; then two at a time change
places. Totals come first. What is left of freedom goes to the rounds of a ring, where device i has
the keys of device i - step: with totals alone, one may have its work in the first round and another
in the last.
"""

import numpy as np

# Of the mean: how much busier the busiest device may become for more even rounds.
_SLACK = 1.02
# Changes of places that are tried for the rounds, for each chunk.
_TRIALS = 40


def deal(tiles: np.ndarray, devices: int) -> np.ndarray:
    """Returns the chunks of each device, `[devices, chunks / devices]`, ascending.

    Args:
      tiles: what the queries of each chunk cost with the keys of each, `[chunks, chunks]`.
      devices: how many there are.
    """
    costs = tiles.sum(1)
    owner = _longest_first(costs, devices)
    while _swapped(costs, owner, devices):
        pass
    owner = _evened(tiles, owner, devices)
    return np.array([np.flatnonzero(owner == i) for i in range(devices)], np.int32)


def _longest_first(costs: np.ndarray, devices: int) -> np.ndarray:
    """The device of each chunk: the dearest first, to the one that has the least so far."""
    room = np.full(devices, len(costs) // devices)
    sums, owner = np.zeros(devices), np.zeros(len(costs), int)
    for chunk in np.argsort(-costs, kind="stable"):
        to = int(np.where(room > 0, sums, np.inf).argmin())
        owner[chunk] = to
        room[to] -= 1
        sums[to] += costs[chunk]
    return owner


def _swapped(costs: np.ndarray, owner: np.ndarray, devices: int) -> bool:
    """Has the busiest device give a chunk for a cheaper one, where that evens two devices out."""
    sums = np.bincount(owner, costs, devices)
    most = int(sums.argmax())
    own, others = np.flatnonzero(owner == most), np.flatnonzero(owner != most)
    if not len(others):
        return False
    saved = costs[own][:, None] - costs[others][None]
    # Of both, the larger sum after the swap.
    after = np.maximum(sums[most] - saved, sums[owner[others]][None] + saved)
    i, j = np.unravel_index(after.argmin(), after.shape)
    if after[i, j] >= sums[most] * (1 - 1e-9):
        return False
    owner[own[i]], owner[others[j]] = owner[others[j]], most
    return True


def _evened(tiles: np.ndarray, owner: np.ndarray, devices: int) -> np.ndarray:
    """Random changes of places, kept where they shorten the rounds and totals stay even."""
    rng = np.random.default_rng(0)
    is_of = np.eye(devices)[:, owner]
    rows = is_of @ tiles
    total = lambda rows: float(rows.sum(1).max())
    limit = max(total(rows), _SLACK * float(tiles.sum()) / devices)
    best = _rounds(rows @ is_of.T)
    for a, b in rng.integers(len(owner), size=(_TRIALS * len(owner), 2)):
        i, j = owner[a], owner[b]
        if i == j:
            continue
        change = tiles[b] - tiles[a]
        rows[i] += change
        rows[j] -= change
        is_of[:, [a, b]] = is_of[:, [b, a]]
        now = _rounds(rows @ is_of.T)
        if now < best and total(rows) <= limit:
            best, owner[a], owner[b] = now, j, i
        else:
            rows[i] -= change
            rows[j] += change
            is_of[:, [a, b]] = is_of[:, [b, a]]
    return owner


def _rounds(tiles: np.ndarray) -> float:
    """The sum over steps of a ring of what the busiest device has to do."""
    n = len(tiles)
    me = np.arange(n)
    return float(sum(tiles[me, (me - step) % n].max() for step in range(n)))
