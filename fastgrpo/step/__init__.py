"""One GRPO step: from prompts to rewarded completions, and from these to updated weights."""
