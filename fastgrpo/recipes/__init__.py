"""Recipes: YAML files of settings for `python -m fastgrpo.train --config FILE`, and what fetches their models."""
