"""Values of tensors on the virtual GPU: computed where the inputs are known, and otherwise assumed by a fixed policy.

Device tensors are meta tensors: they have shapes and no data. Eager code reads data all the same: "is this batch
packed?", "which tokens go to expert 3?", `loss.item()`. So tensors that derive from known numbers alone (masks,
indices, schedules) are computed on the CPU, in a *shadow* of the meta tensor; then the program takes the branch that a
real run takes. A tensor whose elements are all equal is kept as one number. Tensors that derive from floating-point
data are unknown, and reads of unknown tensors follow a policy (policy.py) that the run's assumptions state.

store.py keeps the known contents of each storage, evaluation.py computes an operator on known tensors, and values.py
decides whether a new or changed tensor is computed, has equal elements, or is unknown.
"""

from memprof.virtual.values.values import Values

__all__ = ["Values"]
