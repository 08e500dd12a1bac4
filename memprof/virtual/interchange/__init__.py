"""Patches of functions that access tensor data: pointers, numpy, pickles, checkpoints, safetensors, storages."""
