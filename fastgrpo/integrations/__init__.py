"""The loss with the names and signatures of TRL, Liger-Kernel and verl."""
