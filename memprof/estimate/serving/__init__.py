"""Closed form of the memory of inference engines at start-up, by the rules in their source, without torch."""
