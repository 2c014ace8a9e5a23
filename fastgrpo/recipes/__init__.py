"""Recipes: YAML files of settings for `python -m fastgrpo.train --config FILE`, and a command that fetches a model."""
