"""Reads a recording and presents it as a step table, a request's history, or a trace for Perfetto."""

import json
from pathlib import Path
from typing import Any

from treadle.core.errors import UsageError
from treadle.trace.recorder import FORMAT
from treadle.trace.step_record import StepRecord
from treadle.trace.step_table import StepTable, step_cells, step_kinds

MICROSECONDS = 1e6


class Recording:
    """A file that a StepRecorder wrote.

    Args:
        path: the file.

    Attributes:
        header: block sizes and the scheduler's settings.
        records: one per step.

    Raises:
        UsageError: the file cannot be read, is not a recording, or has another format.
    """

    def __init__(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError("RUN.jsonl", f"{path} cannot be read ({error})") from error
        parsed: list[Any] = []
        for number, line in enumerate(lines, start=1):
            try:
                parsed.append(json.loads(line))
            except ValueError as error:
                if number == len(lines):  # the run was stopped in the middle of a write
                    break
                raise UsageError("RUN.jsonl", f"{path}, line {number}: not JSON ({error})") from error
        header = parsed[0] if parsed else None
        if not isinstance(header, dict) or "treadle_recording" not in header:
            raise UsageError("RUN.jsonl", f"{path} is not a recording")
        if header["treadle_recording"] != FORMAT:
            raise UsageError(
                "RUN.jsonl",
                f"{path} is a recording of format {header['treadle_recording']!r}, but this version reads format "
                f"{FORMAT}; record the run again",
            )
        self.header: dict[str, Any] = header
        self.records: list[StepRecord] = parsed[1:]

    def requests(self) -> list[str]:
        """The requests in order of arrival."""
        return list(dict.fromkeys(name for record in self.records for name in record["arrived"]))

    def table(self, first: int | None = None, last: int | None = None) -> str:
        """The step table of steps `first` to `last`."""
        table = StepTable()
        for record in self.records:
            if (first is None or record["step"] >= first) and (last is None or record["step"] <= last):
                table.add(record)
        return table.render()

    def history(self, name: str) -> str:
        """The history of one request, a line for each change.

        Raises:
            UsageError: there is no such request.
        """
        if name not in self.requests():
            known = ", ".join(self.requests()[:20])
            raise UsageError("--request", f"there is no request {name!r}; there are {known}")
        lines: list[str] = []
        before: str | None = None
        first = last = 0
        start = 0.0
        for record in self.records:
            if name in record["arrived"]:
                start = record["arrived"][name]["time"]
                lines.append(f"arrived with {record['arrived'][name]['prompt_tokens']} prompt tokens")
            cell = step_cells(record).get(name)
            if cell is not None and cell == before:
                last = record["step"]
            else:
                if before is not None:
                    lines[-1] = lines[-1].replace(f"step {first}:", _steps(first, last), 1)
                before, first, last = cell, record["step"], record["step"]
                if cell is not None:
                    lines.append(f"step {first}: {cell}  ({record['time'] - start:.3f} s after arrival)")
            if name in record["finished"]:
                lines[-1] = lines[-1].replace(f"step {first}:", _steps(first, last), 1)
                lines += _outcome_lines(record["finished"][name])
                break
        return "\n".join([f"Request {name}", *(f"  {line}" for line in lines)])

    def chrome_trace(self) -> dict[str, Any]:
        """The run in the Trace Event Format, which Perfetto and chrome://tracing open.

        A row per request shows what it did in each step; counters show blocks, tokens and queues.
        """
        rows = {name: i + 1 for i, name in enumerate(self.requests())}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": f"request {name}"}}
            for name, tid in rows.items()
        ]
        events.append({"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "Treadle"}})
        for record in self.records:
            # On a virtual clock a step may take no time; one microsecond keeps it visible.
            start, duration = record["time"] * MICROSECONDS, max(record["duration"] * MICROSECONDS, 1.0)
            shared = {"ph": "X", "pid": 1, "ts": start, "dur": duration}
            step = {"step": record["step"], "tokens": record["tokens"]}
            events.append({**shared, "tid": 0, "name": f"step {record['step']}", "args": step})
            kinds = step_kinds(record)
            for name, cell in step_cells(record).items():
                events.append({**shared, "tid": rows[name], "name": cell, "cat": kinds[name], "args": step})
            queues = {"running": len(record["ran"]) + len(record["idle"])}
            queues |= {queue: len(record[queue]) for queue in ("waiting", "swapped")}
            for name, values in (("blocks", record["blocks"]), ("queues", queues)):
                events.append({"name": name, "ph": "C", "pid": 1, "ts": start, "args": values})
            events.append({"name": "tokens", "ph": "C", "pid": 1, "ts": start, "args": {"tokens": record["tokens"]}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _steps(first: int, last: int) -> str:
    return f"step {first}:" if first == last else f"steps {first}-{last}:"


def _outcome_lines(outcome: dict[str, Any]) -> list[str]:
    lines = [
        f"ended ({'/'.join(outcome['finish_reasons'])}) after {outcome['finish'] - outcome['arrival']:.3f} s "
        f"with {outcome['output_tokens']} output tokens"
    ]
    if outcome["error"]:
        lines.append(f"error: {outcome['error']}")
    if outcome["queue_time"] is not None:
        lines.append(f"{outcome['queue_time']:.3f} s in the queue, {outcome['cached_tokens']} prompt tokens cached")
    if outcome["first_token"] is not None:
        lines.append(f"first token after {outcome['first_token'] - outcome['arrival']:.3f} s")
    for p in outcome["preemptions"]:
        lines.append(f"preempted in step {p['step']} by {p['for']} ({p['mode']})")
    return lines
