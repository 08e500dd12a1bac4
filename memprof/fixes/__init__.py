"""Fixes switched on: in a spec (fixes.py), or in a user's model (`memprof.apply`, a file for each)."""
