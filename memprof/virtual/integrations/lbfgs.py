"""torch.optim.LBFGS, whose number of iterations, and with it its history, depends on values, which are unknown here.

With unknown values its step would end after one iteration, and would record no pair of directions (values/policy.py).
Here a step makes all of its `max_iter` iterations, and each is recorded, as in a run that has not converged: this takes
the most memory, up to `2 * history_size` vectors of all parameters. A line search ends after two evaluations, which is
what it mostly takes, and leaves more iterations to a step: `max_eval` limits the evaluations of all.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private.autograd import strong_wolfe
from memprof.trace.events import Owner, Role
from memprof.virtual.install_context import InstallContext

# An inner product is 1 in a step: that is more than the 1e-10 from which a pair is recorded, and no descent direction
# is below this tolerance, nor any change of the loss.
_TOLERANCE_OF_NO_CHANGE = -2.0


_LISTS = ("old_dirs", "old_stps")  # variables of the step, which become the optimizer's state at its end


class Lbfgs(Extension):
    """Patches of the optimizer's step and of its line search."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patches."""
        original, values = torch.optim.LBFGS.step, context.values

        @functools.wraps(original)
        def step(self: Any, closure: Any) -> Any:
            group = self.param_groups[0]
            if not any(parameter.is_cuda for parameter in group["params"]):
                return original(self, closure)
            context.assume("LBFGS makes all iterations of a step, and records each: values are not known.")
            tolerance = group["tolerance_change"]
            group["tolerance_change"], values.inner_products_are_one = _TOLERANCE_OF_NO_CHANGE, True
            try:
                return original(self, closure)
            except BaseException as error:
                _set_owners_of_history(context, error)
                raise
            finally:
                group["tolerance_change"], values.inner_products_are_one = tolerance, False

        yield torch.optim.LBFGS, "step", step

        search = strong_wolfe.get(None)
        if search is not None:

            @functools.wraps(search)
            def search_once(*args: Any, **kwargs: Any) -> Any:
                return search(*args, **kwargs | ({"max_ls": 1} if values.inner_products_are_one else {}))

            yield strong_wolfe.patch(search_once)


def _set_owners_of_history(context: InstallContext, error: BaseException) -> None:
    """Set the roles of the vectors that a step has recorded before its closure raised `error`, as it does where memory
    runs out: the frame of the step has them, and not yet the optimizer."""
    file_name = inspect.getfile(torch.optim.LBFGS)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file_name:
            for name in _LISTS:
                for vector in frame.f_locals.get(name) or ():
                    context.recorder.owners.set_owner(vector, Owner(Role.OPTIMIZER_STATE, name))
