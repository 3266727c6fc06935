"""Terminal output of commands: progress while loading, and a summary at the end.

Answers go to standard output; everything else goes to standard error.
"""

import argparse
import codecs
import io
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.assembly.engine_config import EngineConfig
from treadle.cli.options import engine_options, sampling_options
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.scheduler import StepOutputs, StepReport

if TYPE_CHECKING:
    from treadle import LLM

BAR_WIDTH = 24


def use_any_text() -> None:
    """Let standard input and output take any text, whatever the locale.

    Input in an ASCII locale is read as UTF-8, and `as_text` finds what cannot be read; characters that the output
    cannot show are written as escapes, as Python does it on standard error.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str = "") -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def load(args: argparse.Namespace, *, log_stats: bool) -> tuple["LLM", SamplingParams]:
    """Load the engine with a progress bar; return it with the sampling parameters from the options.

    Args:
        args: the parsed command line.
        log_stats: whether to log statistics unless an option decides. False for commands that stream an answer,
            which log lines would interrupt.
    """
    given = sampling_options(args)
    # Report invalid options before loading torch and a model.
    SamplingParams(**given)
    options = engine_options(args)
    if not log_stats:
        options.setdefault("log_stats_interval_s", 0.0)
    config = EngineConfig(**options)
    line = _ProgressLine(f"Loading {config.model}")
    line.show(0.0)
    try:
        from treadle import LLM

        llm = LLM(**options, on_progress=line.show)
    finally:
        line.clear()
    defaults = {"temperature": 0.0, **llm.sampling_defaults}
    return llm, SamplingParams(**{**defaults, **given})


class _ProgressLine:
    """A progress bar on a terminal; prints nothing elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_terminal = sys.stderr.isatty()

    def show(self, share: float) -> None:
        """Draw the bar at `share` of the work, 0 to 1; remove the bar at 1."""
        if share >= 1.0:
            self.clear()
        elif self._is_terminal:
            full = round(share * BAR_WIDTH)
            bar = "█" * full + "░" * (BAR_WIDTH - full)
            print(f"\r{self._title}  {bar} {share:4.0%}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class RunStats:
    """Counts tokens, steps and blocks of a run, for the summary.

    Args:
        num_blocks: number of KV blocks in the device tier.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._start = time.monotonic()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0
        self._peak_blocks = 0
        self._first_token_s: list[float] = []
        self._num_cached_tokens = 0

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Count the work of a step, and record the time to first token of finished requests."""
        if report is not None:
            self._num_steps += 1
            self._num_preemptions += len(report.preempted)
            self._peak_blocks = max(self._peak_blocks, report.num_used_blocks)
        if outputs is not None:
            self._num_prompt_tokens += outputs.num_prompt_tokens + outputs.num_recomputed_tokens
            self._num_output_tokens += outputs.num_generated_tokens
            self._num_cached_tokens += outputs.num_cached_tokens
        for request in finished:
            if request.metrics.time_to_first_token is not None:
                self._first_token_s.append(request.metrics.time_to_first_token)

    def summary(self) -> str:
        """Return one line: tokens, tokens/s, time to first token, steps, blocks."""
        elapsed = time.monotonic() - self._start
        first = max(self._first_token_s, default=0.0)
        parts = [
            f"{self._num_output_tokens} tokens in {elapsed:.1f} s",
            f"{self._num_output_tokens / elapsed:.1f} tokens/s",
            f"first token after {first * 1000:.0f} ms",
            f"{self._num_prompt_tokens} prompt tokens computed, {self._num_cached_tokens} from the cache",
            f"{self._num_steps} steps",
            f"{self._peak_blocks} of {self._num_blocks} KV blocks at the peak",
        ]
        if self._num_preemptions:
            parts.append(f"{self._num_preemptions} preemptions")
        return " · ".join(parts)
