"""The virtual GPU: the user's real model, autograd engine and optimizer, on meta tensors that look like `cuda:0`."""

from memprof.platforms import require_posix

require_posix("running a program or a model")

from memprof.virtual.gpu import VirtualGpu  # noqa: E402 (it needs what was asked for)

__all__ = ["VirtualGpu"]
