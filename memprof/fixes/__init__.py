"""Implementations of fixes, as edits of a spec (spec_edits.py) or of a model (`memprof.apply`, one file per fix)."""
