"""Number of random examples per test: a tenth by default, all with TREADLE_TEST_EXAMPLES=all (as in CI)."""

import os
from typing import Any

from hypothesis import settings

SHARE = 1.0 if os.environ.get("TREADLE_TEST_EXAMPLES") == "all" else 0.1


def share(count: int, at_least: int) -> int:
    """Return how many examples to run, where CI runs `count`."""
    return max(at_least, round(count * SHARE))


def examples(count: int, **options: Any) -> settings:
    """Return the Hypothesis settings of a test for which CI runs `count` examples."""
    return settings(max_examples=share(count, at_least=10), deadline=None, **options)
