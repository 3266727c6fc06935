"""A load generator for servers that speak OpenAI's API: what is sent and when, how it is measured, what is told."""
