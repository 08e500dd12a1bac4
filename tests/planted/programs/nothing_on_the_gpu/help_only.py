# Prints what it can do, and leaves.
# fits: none
# exit: 1
# why: nothing is on a GPU when it leaves.
import sys

import torch

if len(sys.argv) == 1:
    print("usage: help_only.py FILE")
    sys.exit(0)
torch.load(sys.argv[1])
