"""Values on the virtual GPU: which numbers are really computed, and what is assumed of those that are not.

Device tensors are meta tensors: they have shapes and no data. Eager code reads data all the same: "is this batch
packed?", "which tokens go to expert 3?", `loss.item()`. So what derives from known numbers alone (masks, indices,
schedules) is really computed, on the CPU beside its meta tensor (a *shadow*); then the program takes the branch that a
real run takes. A tensor whose elements are all alike takes one number, whatever its size. What derives from
floating-point data is unknown, and reads of it follow a fixed policy (policy.py), stated in the run's assumptions.

store.py keeps what is known of each storage, evaluation.py computes an operator of known tensors, and values.py decides
what a new or changed tensor takes: that, or the one value of elements that are all alike.
"""

from memprof.virtual.values.values import Values

__all__ = ["Values"]
