"""Patches of every access to tensor data: pointers, numpy, pickles, checkpoints, safetensors files, storages."""
