"""How many random examples a test runs: a few by default, all of them with TREADLE_TEST_EXAMPLES=all (as in CI)."""

import os
from typing import Any

from hypothesis import settings

SHARE = 1.0 if os.environ.get("TREADLE_TEST_EXAMPLES") == "all" else 0.1


def share(count: int, at_least: int) -> int:
    """How many of the `count` examples in CI are run."""
    return max(at_least, round(count * SHARE))


def examples(count: int, **options: Any) -> settings:
    """Hypothesis's settings for `count` examples in CI."""
    return settings(max_examples=share(count, at_least=10), deadline=None, **options)
