"""The `treadle` command."""

EXIT_INTERRUPTED = 130
"""Of a command that Ctrl-C ended; what shells expect."""
