"""Fixes that reduce memory: as edits of a spec (spec_edits.py), or as changes to a model (a file for each fix)."""
