"""Operators whose results torch makes in C++, of other strides or in other pieces than CUDA's kernels do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memprof.patching.extension import Extension
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels.whole import kept_whole
from memprof.virtual.shapes import made_in_cpp


class ResultsInCpp(Extension):
    """Their kernels for meta tensors, which are registered with torch's dispatcher for the length of the run."""

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Have them registered."""
        with kept_whole(), made_in_cpp():
            yield
