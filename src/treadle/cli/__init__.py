"""The `treadle` command."""

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells expect it."""
