"""What the program is refused in a run: it is noted, for a program may catch the error and go on as on no GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

from memprof.patching.extension import Extension
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import noting


class Refusals(Extension):
    """Errors of the virtual GPU's own (limits.py)."""

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return what has them told to the run."""
        return noting(context.refused)
