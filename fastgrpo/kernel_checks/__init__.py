"""Checks every kernel on the machine at hand against the specification."""
