"""How many random examples a test runs: a few by default, all of them with TREADLE_TEST_EXAMPLES=all (as in CI)."""

import os
from typing import Any

from hypothesis import settings

SHARE = 1.0 if os.environ.get("TREADLE_TEST_EXAMPLES") == "all" else 0.15


def examples(count: int, **options: Any) -> settings:
    """Settings for `count` examples in CI."""
    return settings(max_examples=max(10, round(count * SHARE)), deadline=None, **options)
