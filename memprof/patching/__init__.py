"""Replacing attributes of others' modules and classes, and putting every one of them back."""
