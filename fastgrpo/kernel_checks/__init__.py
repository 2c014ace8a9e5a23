"""Checks of every kernel on the machine at hand: its values against the specification, and its time."""
