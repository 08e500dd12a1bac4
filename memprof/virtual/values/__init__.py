"""Values of tensors on the virtual GPU: computed where the inputs are known, and otherwise assumed by a fixed policy.

Tensors of the virtual GPU are meta tensors, with shapes and without data. Eager code also reads data: "is this batch
packed?", "which tokens go to expert 3?", `loss.item()`. So tensors that derive from known values only (masks, indices,
schedules) are computed on the CPU, in a *shadow* of the meta tensor, and the program takes the branch that a real run
takes. A tensor whose elements are all equal is stored as one value. Tensors that derive from floating-point data are
unknown, and reads of unknown tensors follow a policy (policy.py) that the run's assumptions state.

store.py has the known values of each storage, evaluation.py computes an operator on known values, and values.py
decides whether a new or changed tensor is computed, has equal elements, or is unknown.
"""

from memprof.virtual.values.values import Values

__all__ = ["Values"]
