"""Kernels of the virtual GPU, one family per file; registry.py has the decorators and imports all files."""
