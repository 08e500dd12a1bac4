"""The version of memprof."""

__version__ = "0.1.0"
