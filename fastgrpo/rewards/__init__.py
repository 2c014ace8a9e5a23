"""Reward functions: finding and calling them, and those that tasks bring."""
