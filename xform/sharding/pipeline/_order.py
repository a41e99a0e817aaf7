"""What an action waits for: the one table of dependencies that everything here reads."""

from __future__ import annotations

from collections.abc import Iterator

from xform.sharding.pipeline._schedule import Action, Schedule


class Order:
    """The dependencies between a schedule's actions.

    Attributes:
      spelled_out: whether the table has messages of its own, by which results then travel.
      backward: for stage and microbatch, the action that makes the gradient of the stage's input.
    """

    def __init__(self, schedule: Schedule):
        actions = [action for _, _, action in schedule.actions()]
        self.last = schedule.stages - 1
        self.rank_of = schedule.rank_of
        self.spelled_out = any(len(action.kind) > 1 for action in actions)
        self.backward = {(a.stage, a.microbatch): a for a in actions if a.kind in "BI"}

        self._known: dict[Action, list[Action]] = {}

    def needs(self, action: Action) -> list[Action]:
        """The actions whose results `action` reads, wherever they run."""
        if action not in self._known:
            self._known[action] = self._needs(action)
        return self._known[action]

    def _needs(self, action: Action) -> list[Action]:
        kind, stage, m = action.kind, action.stage, action.microbatch
        match kind:
            case "F" if stage > 0:
                return [self._from(stage, stage - 1, "RECV_F", Action("F", stage - 1, m))]
            case "B" | "I" if stage < self.last:
                made = self.backward.get((stage + 1, m), Action("B", stage + 1, m))
                return [Action("F", stage, m), self._from(stage, stage + 1, "RECV_B", made)]
            case "B" | "I" | "SEND_F":
                return [Action("F", stage, m)]
            case "W":
                return [Action("I", stage, m)]
            case "SEND_B":
                return [self.backward.get((stage, m), Action("B", stage, m))]
            case "RECV_F":
                return [Action("SEND_F", stage - 1, m)] if stage > 0 else []
            case "RECV_B":
                return [Action("SEND_B", stage + 1, m)] if stage < self.last else []
        return []

    def _from(self, stage: int, other: int, message: str, made: Action) -> Action:
        """What brings a result of another stage: its making, or a message that the table has."""
        by_message = self.spelled_out and self.rank_of[other] != self.rank_of[stage]
        return Action(message, stage, made.microbatch) if by_message else made


def run(schedule: Schedule, order: Order) -> Iterator[tuple[int, int, tuple[Action, ...]]]:
    """Runs each rank's row as far as it comes: yields rank, step and cell as they get their turn.

    A cell has its turn after all that its actions need, but what they need of each other. Where all
    ranks that are left wait, it ends.
    """
    done: set[Action] = set()
    steps = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while steps[rank] < len(row):
                cell = row[steps[rank]]
                needs = (need for action in cell for need in order.needs(action))
                if any(need not in done and need not in cell for need in needs):
                    break
                yield rank, steps[rank], cell
                done.update(cell)
                steps[rank] += 1
                moved = True
