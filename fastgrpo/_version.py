"""The version, which setup.py reads too. CONTRIBUTING.md says what it promises."""

__version__ = "0.1.0"
