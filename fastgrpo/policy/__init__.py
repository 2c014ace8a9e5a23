"""The policy: loading, forward passes on packed tokens, adapters, and the frozen reference."""
