"""Evaluation on held-out prompts: accuracy, pass@k and maj@k, with intervals."""
