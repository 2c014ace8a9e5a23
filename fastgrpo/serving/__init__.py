"""Serves a `RolloutEngine` over HTTP, with the routes of OpenAI's API and of vLLM."""
