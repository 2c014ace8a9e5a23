"""The loss under the names and signatures of other projects: TRL, Liger-Kernel and verl, a module each."""
