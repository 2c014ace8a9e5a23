"""Settings: one frozen record of all of them, their YAML files, and the command line."""
