"""Random legal tables, and ways to spoil one that say which cell is spoilt."""

from collections import defaultdict

import numpy as np

from xform.sharding.pipeline import Action, Schedule


def random_table(
    seed: int,
    ranks: int | None = None,
    microbatches: int | None = None,
    *,
    chunks: int | None = None,
    neighbours: bool = False,
    parts: float = 0.5,
    together: bool = True,
) -> Schedule:
    """A legal table: actions in a random order in which each comes after what it needs.

    Args:
      seed: of everything random.
      ranks, microbatches, chunks: how many, random where None.
      neighbours: whether stages follow one another on neighbouring ranks: a loop or a V.
      parts: the share of backward passes made in two parts.
      together: whether some cells hold two actions.
    """
    rng = np.random.default_rng(seed)
    ranks = ranks or int(rng.integers(1, 6))
    microbatches = microbatches or int(rng.integers(1, 7))
    chunks = chunks or int(rng.integers(1, 3))
    rank_of = [*range(ranks)] * chunks
    if neighbours and rng.random() < 0.5:
        rank_of = [r if c % 2 == 0 else ranks - 1 - r for c in range(chunks) for r in range(ranks)]
    if not neighbours:
        rng.shuffle(rank_of)
    last = len(rank_of) - 1
    split = rng.random((last + 1, microbatches)) < parts
    ready = [Action("F", 0, m) for m in range(microbatches)]
    rows: list[list[list[Action]]] = [[] for _ in range(ranks)]
    before = -1
    while ready:
        action = ready.pop(int(rng.integers(len(ready))))
        rank, kind, s, m = rank_of[action.stage], action.kind, action.stage, action.microbatch
        # Two that follow one another in the whole order may wait for all that both need.
        if together and rank == before and rng.random() < 0.3:
            rows[rank][-1].append(action)
        else:
            rows[rank].append([action])
        before = rank
        back = lambda s, m: Action("I" if split[s, m] else "B", s, m)
        if kind == "F":
            ready.append(back(s, m) if s == last else Action("F", s + 1, m))
        elif kind in "BI":
            ready += [back(s - 1, m)] if s else []
            ready += [Action("W", s, m)] if kind == "I" else []
    return Schedule(rows)


def spelled_out(schedule: Schedule) -> Schedule:
    """The table with its messages: sent once made, received at the latest moment in their order."""
    rank_of, last = schedule.rank_of, schedule.stages - 1
    order = _order(schedule)
    channels = defaultdict(list)
    rows = [[] for _ in range(schedule.ranks)]
    received = defaultdict(int)
    for rank, cell in order:
        for action in cell:
            other = {"F": action.stage - 1}.get(action.kind, action.stage + 1)
            if action.kind == "W" or not 0 <= other <= last or rank_of[other] == rank:
                continue
            kind = "F" if action.kind == "F" else "B"
            want = Action(f"RECV_{kind}", action.stage, action.microbatch)
            channel = channels[rank_of[other], rank]
            while want in channel[received[rank_of[other], rank] :]:
                rows[rank].append(channel[received[rank_of[other], rank]])
                received[rank_of[other], rank] += 1
        rows[rank].append(cell)
        for action in cell:
            to = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
            if 0 <= to <= last and rank_of[to] != rank:
                kind = "F" if action.kind == "F" else "B"
                rows[rank].append(Action(f"SEND_{kind}", action.stage, action.microbatch))
                channels[rank, rank_of[to]].append(Action(f"RECV_{kind}", to, action.microbatch))
    return Schedule(rows)


def _order(schedule: Schedule):
    """The cells in an order in which they can run, each with its rank."""
    done, steps, out = set(), [0] * schedule.ranks, []
    back = {(a.stage, a.microbatch): a for _, _, a in schedule.actions() if a.kind in "BI"}

    def ready(action, cell):
        s, m = action.stage, action.microbatch
        needs = []
        if action.kind == "F" and s:
            needs = [Action("F", s - 1, m)]
        elif action.kind in "BI":
            needs = [Action("F", s, m)] + ([back[s + 1, m]] if s < schedule.stages - 1 else [])
        elif action.kind == "W":
            needs = [Action("I", s, m)]
        return all(need in done or need in cell for need in needs)

    while len(out) < sum(map(len, schedule.rows)):
        for rank, row in enumerate(schedule.rows):
            while steps[rank] < len(row) and all(
                ready(a, row[steps[rank]]) for a in row[steps[rank]]
            ):
                out.append((rank, row[steps[rank]]))
                done.update(row[steps[rank]])
                steps[rank] += 1
    return out


def mutant(seed: int, schedule: Schedule) -> tuple[str, Schedule, set]:
    """The table with one thing spoilt: how, the table, and the cells that a report may name.

    A cell is (rank, step, action); the step is None for what is not there.
    """
    rng = np.random.default_rng(seed)
    rows = [[list(cell) for cell in row] for row in schedule.rows]
    places = [(r, i, a) for r, i, a in schedule.actions()]
    rank, step, action = places[int(rng.integers(len(places)))]
    kind = ["drop", "twice", "elsewhere", "microbatch", "stranger", "stage", "swap", "circle"][
        seed % 8
    ]
    if kind == "elsewhere" and schedule.ranks == 1:
        kind = "twice"
    if kind == "circle" and (spoilt := _circle(rng, schedule)):
        return "circle", *spoilt
    if kind in ("swap", "circle"):
        return "swap", *_swap(rng, schedule)
    cell = rows[rank][step]
    match kind:
        case "drop":
            cell.remove(action)
            return kind, Schedule(rows), {(rank, None, action)}
        case "twice":
            at = int(rng.integers(step + 1, len(rows[rank]) + 1))
            rows[rank].insert(at, [action])
            return kind, Schedule(rows), {(rank, at, action)}
        case "elsewhere":
            other = (rank + int(rng.integers(1, schedule.ranks))) % schedule.ranks
            at = int(rng.integers(len(rows[other]) + 1))
            rows[other].insert(at, [action])
            return kind, Schedule(rows), {(other, at, action)}
    if kind == "microbatch":
        m = (action.microbatch + 1) % schedule.microbatches
        wrong = Action(action.kind, action.stage, m)
    elif kind == "stranger":
        wrong = Action(action.kind, action.stage, action.microbatch + schedule.microbatches + 3)
    else:
        wrong = Action(action.kind, action.stage + schedule.stages, action.microbatch)
    cell[cell.index(action)] = wrong
    # What is there twice now is one of two places; beside it the action itself is missing.
    found = {(rank, i, wrong) for i, c in enumerate(rows[rank]) if wrong in c}
    return kind, Schedule(rows), found | {(rank, None, action)}


def _swap(rng, schedule: Schedule):
    """An action and what it needs on the same rank change places."""
    rows = [[list(cell) for cell in row] for row in schedule.rows]
    at = {a: (r, i) for r, i, a in schedule.actions()}
    second = [a for a in at if a.kind in "BIW"]
    action = second[int(rng.integers(len(second)))]
    need = Action("I" if action.kind == "W" else "F", action.stage, action.microbatch)
    (rank, late), (_, early) = at[action], at[need]
    i, j = rows[rank][late].index(action), rows[rank][early].index(need)
    rows[rank][late][i], rows[rank][early][j] = need, action
    return Schedule(rows), {(rank, early, action)}


def _circle(rng, schedule: Schedule):
    """Rank p does B of one microbatch before F of another; the next rank the other way round."""
    if schedule.ranks == 1 or len({*schedule.rank_of}) != schedule.stages:
        return None
    at = {a: (r, i) for r, i, a in schedule.actions()}
    back = {(a.stage, a.microbatch): a for a in at if a.kind in "BI"}
    choices = []
    for s in range(schedule.stages - 1):
        for m in range(schedule.microbatches):
            for n in range(schedule.microbatches):
                if at[back[s, m]][1] < at[Action("F", s, n)][1]:
                    choices.append((s, m, n))
    if not choices:
        return None
    s, m, n = choices[int(rng.integers(len(choices)))]
    rank = schedule.rank_of[s + 1]
    row = [[a for a in cell if a.microbatch != m] for cell in schedule.rows[rank]]
    moved = [[a] for cell in schedule.rows[rank] for a in cell if a.microbatch == m]
    after = next(i for i, cell in enumerate(row) if Action("F", s + 1, n) in cell)
    rows = [list(row) for row in schedule.rows]
    rows[rank] = row[: after + 1] + moved + row[after + 1 :]
    spoilt = Schedule(rows)
    at = {a: (r, i) for r, i, a in spoilt.actions()}
    cells = (back[s, m], Action("F", s + 1, n))
    return spoilt, {(*at[a], a) for a in cells}
