"""torch.optim.LBFGS, whose number of iterations, and with it its history, depends on values, which are unknown here.

With unknown values its step would end after one iteration, and would record no pair of directions (values/policy.py).
Here a step makes all of its `max_iter` iterations, and each is recorded, as in a run that has not converged: this takes
the most memory, up to `2 * history_size` vectors of all parameters. A line search ends after two evaluations, which is
what it mostly takes, and leaves more iterations to a step: `max_eval` limits the evaluations of all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private.autograd import strong_wolfe
from memprof.virtual.install_context import InstallContext

# An inner product is 1 in a step: that is more than the 1e-10 from which a pair is recorded, and no descent direction
# is below this tolerance, nor any change of the loss.
_TOLERANCE_OF_NO_CHANGE = -2.0


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
            finally:
                group["tolerance_change"], values.inner_products_are_one = tolerance, False

        yield torch.optim.LBFGS, "step", step

        search = strong_wolfe.get(None)
        if search is not None:

            @functools.wraps(search)
            def search_once(*args: Any, **kwargs: Any) -> Any:
                return search(*args, **kwargs | ({"max_ls": 1} if values.inner_products_are_one else {}))

            yield strong_wolfe.patch(search_once)
