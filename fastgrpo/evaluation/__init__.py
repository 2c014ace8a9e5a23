"""Held-out accuracy: greedy completions, pass@k and maj@k, with their intervals."""
