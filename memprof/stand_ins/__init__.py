"""Packages of others that are not installed, stood in for by what they allocate (docs/stand-ins.md)."""
