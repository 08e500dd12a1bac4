"""What a step costs, what a remedy adds to it, and what is in the way of a run."""

from memprof.flows.cost.bottleneck import bottleneck_of
from memprof.flows.cost.price import cost_of
from memprof.flows.cost.work import StepWork, step_work

__all__ = ["StepWork", "bottleneck_of", "cost_of", "step_work"]
