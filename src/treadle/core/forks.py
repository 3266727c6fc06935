"""Whether this process may compute: after a fork, the threads that its parent computed with are missing.

A parallel loop of torch's in the child would wait for them for ever, also that of an engine that the child has made
itself.
"""

import os

from treadle.core.errors import EngineError

_is_watching = False
_is_left_behind = False


def watch_forks() -> None:
    """Say that this process computes: `check_not_forked` raises in what is forked from now on."""
    global _is_watching
    if not _is_watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
        _is_watching = True


def check_not_forked() -> None:
    """Raise EngineError in a process that was forked from one that computed."""
    if _is_left_behind:
        raise EngineError(
            "this process was forked from one in which Treadle has computed, and the threads that compute are not in "
            'it; start it with multiprocessing.get_context("spawn") and make the LLM there, or fork before the first '
            "LLM is made"
        )


def _after_fork() -> None:
    global _is_left_behind
    _is_left_behind = True
