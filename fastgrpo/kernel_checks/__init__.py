"""Checks every kernel on this machine against its specification."""
