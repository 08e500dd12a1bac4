"""Run the day.

    make gpu                                               on a machine with a GPU, in at most ten minutes
    GPU_DAY_DEVICE=cpu make gpu                            its logic, on any machine
    GPU_DAY_STEPS="probe kineto" OUT=results make gpu      some steps alone

Steps go from what decides most to what is nice to have. A program is skipped where less time is left than it needs.
summary.txt in $OUT has a line for each, log.txt what they said last, and an archive for each step what they wrote.

Exit codes: 0; 1 a program failed or was ended at its limit; 2 a setting has a value that it cannot have.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.gpu import steps
from tests.gpu.budget import Budget
from tests.gpu.day import Day
from tests.gpu.settings import read_settings
from tests.gpu.task import Task, module

USAGE = 2


def main() -> int:
    try:
        settings = read_settings(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    budget = Budget(settings.seconds)
    # What was measured until then is packed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as work, Day(settings, budget, Path(work)) as day:
        day.install_wheels()
        day.run(Task("probe/machine", module("tests.gpu.machine"), needs=5, limit=30))
        for name in settings.steps:
            steps.RUN[name](day)
            day.pack()
        day.finish()
    day.say(f"{day.summary.total()}: {settings.out}")
    return 0 if day.summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
