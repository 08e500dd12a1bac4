"""Private names of torch, each in one place: which releases have it, and what memprof does without it.

No other file has such a name but those of operators (`torch.ops.aten._softmax`), which are kernels and no Python. What
is called for each operator is bound when its file is imported (`bind`); a name of a module that may not have been
imported, or whose value changes, is looked up where it is used (`PrivateName.get`).
"""
