"""Generation inside the trainer's process, from the policy's own weights."""
