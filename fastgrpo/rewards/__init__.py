"""Reward functions: how they are found, called and checked, and the functions that come with tasks."""
