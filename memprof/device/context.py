"""Memory of a process on a GPU outside torch's allocator: the CUDA context, loaded kernels, memory of libraries.

It is part of device memory used, but not of reserved memory. It differs by GPU, driver and called functions; the sizes
here are for drivers that load a kernel at its first call, as drivers do since CUDA 11.7.
"""

from __future__ import annotations

# An RTX 6000 Ada with torch 2.10 and CUDA 13.0 (github.com/unslothai/unsloth-zoo, pull request 1053).
CONTEXT_BYTES = 426 << 20

# By compute capability, where a GPU was measured in training. 9.0: an H100 and an H200 with driver 580, torch 2.11 and
# CUDA 13.0; 742 to 758 MiB in eight models of linear layers, convolutions and attention (610 from the first kernel on,
# 66 for each of the two threads that multiply, 8 to 16 for cuDNN and attention), and 630 in recurrent layers alone.
_IN_TRAINING = {(9, 0): 750 << 20}

# The most that was published: with drivers before CUDA 11.7, which load all of torch's kernels at once, on a V100
# (docs/source/en/model_memory_anatomy.md of github.com/huggingface/transformers).
LARGEST_CONTEXT_BYTES = 1343 << 20


def get_context_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the context's bytes on a GPU of this compute capability: measured there, or else on another GPU."""
    return _IN_TRAINING.get(compute_capability, CONTEXT_BYTES)
