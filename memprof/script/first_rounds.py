"""Training steps at which the loops around them do something for the first time: what a stopped run has not seen.

A loop ends for the first time: the loop around it goes on to its second round (a second epoch, another fold), or the
code behind the loops runs. And a loop does something in each n-th step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import FrameType

from memprof.script.loops import Position, estimate_round_ends, find_position, list_periods

# Steps of a second round that show what it does: enough for growth to be seen. Behind the outermost loop there may be
# none; a run that goes on in the last step comes there.
NUM_STEPS_OF_ROUND = 6

# Calls in each n-th step that may take memory: an evaluation, samples, a checkpoint.
_PERIODIC = re.compile(r"\.eval\(\)|\w*(?:eval|valid|test|sampl|generat|predict|save|checkpoint|penalty)\w*\(")

# Calls in each n-th step by which a list grows, and how often they are to be seen.
_KEEPING = re.compile(r"\.(?:append|extend)\(")
_NUM_KEPT = 3


@dataclass(slots=True)
class FirstRounds:
    """Steps at which loops do something for the first time; the estimates become better until a step is reached."""

    positions: list[Position] = field(default_factory=list)  # in the program's loops, at ever fewer steps
    # (file, line) of a loop -> step that shows what follows its first end; None: not known.
    _ends: dict[tuple[str, int], int | None] = field(default_factory=dict)
    _periods: set[int] = field(default_factory=set)

    def record_step(self, step: int, frame: FrameType | None) -> None:
        """Record where training step `step`, from 1, was made: at the first, and at each twice as late as the last."""
        if self.positions and step < 2 * self.positions[-1].step:
            return
        position = find_position(step, frame)
        for depth, (loop, end) in enumerate(estimate_round_ends(self.positions, position)):
            if (self._ends.get(loop.location) or step) >= step:
                self._ends[loop.location] = None if end is None else end + (NUM_STEPS_OF_ROUND if depth else 1)
        self._periods |= set(list_periods(frame, _PERIODIC))
        self._periods |= {_NUM_KEPT * period for period in list_periods(frame, _KEEPING)}
        self.positions.append(position)

    def count_steps_to_come(self, step: int) -> int | None:
        """Return after how many more steps than `step` the next such thing is seen; None: nothing is to come."""
        ends = [step + 1 if end is None else end for end in self._ends.values()]
        periodic = [period + 1 for period in self._periods]  # after the n-th step
        return min((one - step for one in (*ends, *periodic) if one > step), default=None)
