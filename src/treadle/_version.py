"""The version, read by the build and by `treadle --version`."""

__version__ = "0.1.0"
