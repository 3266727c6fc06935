"""Plain data that every room shares: requests, settings, outputs, errors. Imports no torch."""
