"""The state of torch's optimizers, for estimates and for runs that end before it is made."""

# Elements of state that an optimizer has per parameter, and of temporaries in its step over all at once
# (torch/optim/*.py, the _multi_tensor functions).
OPTIMIZER_STATES = {
    "adamw": (2, 1), "adam": (2, 1), "sgd": (0, 0), "sgd-momentum": (1, 0), "adagrad": (1, 2), "rmsprop": (1, 1),
    "none": (0, 0),
}  # fmt: skip
