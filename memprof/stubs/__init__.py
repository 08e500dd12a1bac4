"""Packages of others that are not installed, replaced by a stub by what they allocate (docs/stubs.md)."""
