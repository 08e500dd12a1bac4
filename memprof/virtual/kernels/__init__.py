"""One family of kernels a file; registry.py says how a file registers what it holds, and imports them all."""
