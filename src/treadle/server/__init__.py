"""The HTTP server: OpenAI's API, with vLLM's extras, on the engine."""
