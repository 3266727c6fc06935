"""Puts the rooms together: settings, memory, and the engine made of them."""
