"""Stubs of packages that are not installed, which allocate as the real packages do (docs/stubs.md)."""
