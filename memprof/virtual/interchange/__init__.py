"""Patches of all access to the data of tensors: pointers, numpy, pickles, checkpoints, safetensors files, storages."""
