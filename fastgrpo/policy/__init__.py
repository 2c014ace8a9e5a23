"""The policy: loading it, running it on packed tokens, adapters, and the frozen reference."""
