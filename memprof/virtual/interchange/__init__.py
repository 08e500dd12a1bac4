"""What reaches the data of tensors: pointers, numpy, pickles, checkpoints, files of safetensors, storages."""
