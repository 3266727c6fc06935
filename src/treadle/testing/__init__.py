"""Tests for your own policies: random traces on a toy runner that detects every lost or misplaced token."""

from treadle.testing.policies import check_policy

__all__ = ["check_policy"]
