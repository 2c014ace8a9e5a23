"""The loss as a library: advantages, objectives and losses. It needs only torch and Triton."""
