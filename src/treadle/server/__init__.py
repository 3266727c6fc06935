"""The HTTP server: OpenAI's API with vLLM's extensions."""
