"""The operations that a model is made of."""
