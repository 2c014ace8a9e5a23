"""Rows, prompts and completions: the records that cross stages, and the sources that rows are drawn from."""
