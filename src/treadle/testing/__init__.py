"""For tests of your own policies: random traces on a toy runner that notices every lost or misplaced token."""

from treadle.testing.policies import check_policy

__all__ = ["check_policy"]
