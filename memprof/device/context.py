"""What the CUDA context takes of a GPU before the first tensor: part of device used, never of reserved."""

from __future__ import annotations

# 426 MiB, measured on an RTX 6000 Ada with torch 2.10 and CUDA 13.0 (github.com/unslothai/unsloth-zoo, pull request
# 1053). It grows as kernels load and differs by GPU and driver; memprof states it as an assumption.
CONTEXT_BYTES = 426 << 20

# The most that was published: with drivers before CUDA 11.7, which load all of torch's kernels at once, on a V100
# (docs/source/en/model_memory_anatomy.md of github.com/huggingface/transformers).
LARGEST_CONTEXT_BYTES = 1343 << 20
