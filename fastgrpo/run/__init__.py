"""The folder, checkpoints, log, curves and warnings of a run, and how a run is resumed."""
