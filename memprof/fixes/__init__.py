"""Fixes switched on: in a spec (spec_edits.py), or in a user's model (`memprof.apply`, a file for each)."""
