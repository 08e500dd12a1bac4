"""Private names of torch, each in one place, with the releases that have it and what memprof does without it.

Other files use no private names but those of operators (`torch.ops.aten._softmax`), which are not Python. A
function called for each operator is bound when its file is imported (`bind`); a name of a module that may not have been
imported, or whose value changes, is looked up on each use (`PrivateName.get`).
"""
