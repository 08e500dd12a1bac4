"""The virtual GPU: the user's real model, autograd engine and optimizer, on meta tensors that look like `cuda:0`."""

from memprof.virtual.gpu import VirtualGpu

__all__ = ["VirtualGpu"]
