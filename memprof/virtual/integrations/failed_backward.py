"""A backward pass that fails leaves no tensors behind, as on a GPU.

The autograd engine keeps nodes that are ready to run in a queue, and each node keeps what its graph has saved. The
queue of a GPU is emptied by a thread of its own, which drops the nodes of passes that have failed. That of the CPU, by
which the virtual GPU's passes run, is read by later passes alone, and these stop before nodes that were made earlier
(torch/csrc/autograd/engine.cpp, `Engine::thread_main`): a pass over the oldest node of all reads to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd
from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.install_context import InstallContext


class FailedBackward(Extension):
    """A patch of the autograd engine by which the nodes of a failed backward pass are dropped."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patch of the function that runs backward passes."""
        run_backward, run_engine = autograd.engine_run_backward.get(), autograd.engine_run_backward_of_graph.get()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True)
            oldest = leaf.neg()

        def run_and_drop(*args: Any, **kwargs: Any) -> Any:
            try:
                return run_backward(*args, **kwargs)
            except BaseException:
                if autograd.current_graph_task_id() == -1:  # not within another pass, which fails too
                    with torch.DisableTorchFunction(), disable_current_modes():
                        run_engine((oldest,), (torch.ones(()),), True, False, (leaf,), accumulate_grad=False)
                raise

        yield autograd.engine_run_backward.patch(run_and_drop)
