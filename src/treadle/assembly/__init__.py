"""Builds an engine from a user's settings."""
