"""A load generator for servers that speak OpenAI's API: workloads, client, report."""
