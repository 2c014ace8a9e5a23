"""What a run leaves behind and how it goes on: its folder, checkpoints, log, curves and warnings."""
