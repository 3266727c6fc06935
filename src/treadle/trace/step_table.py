"""Shows a schedule as a text table: what each request did in each step."""

from collections.abc import Sequence

from treadle.core.clock import Clock
from treadle.core.request import Request
from treadle.scheduler import StepOutputs, StepReport, WaitReason
from treadle.trace.step_record import StepDescriber, StepRecord


class StepTable:
    """A table with a row per step and a column per request, in order of arrival.

    Consecutive steps with the same cells share a row.
    """

    def __init__(self) -> None:
        self._columns: dict[str, None] = {}
        self._rows: list[tuple[int, int, int, dict[str, str]]] = []

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        cells = step_cells(record)
        self._columns.update(dict.fromkeys([*record["arrived"], *cells]))
        step, tokens = record["step"], record["tokens"]
        if self._rows and self._rows[-1][1] == step - 1 and self._rows[-1][2:] == (tokens, cells):
            self._rows[-1] = (self._rows[-1][0], step, tokens, cells)
        else:
            self._rows.append((step, step, tokens, cells))

    def render(self) -> str:
        """The table, as lines of text."""
        lines = [["step", "tokens", *self._columns]]
        for first, last, tokens, cells in self._rows:
            steps = str(first) if first == last else f"{first}-{last}"
            lines.append([steps, str(tokens), *(cells.get(name, "") for name in self._columns)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        drawn = [
            "  ".join(
                cell.rjust(width) if i < 2 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        drawn.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join(drawn)


class StepTableObserver:
    """Fills a StepTable while an engine runs, from the same records that a StepRecorder writes.

    Args:
        num_blocks: of the device tier.
        clock: of the engine.
    """

    wants_details = True

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        self.table = StepTable()
        self._describer = StepDescriber(num_blocks, clock)

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Add a row for the step; requests that ended without one are shown with the next."""
        record = self._describer.describe(report, finished)
        if record is not None:
            self.table.add(record)


def step_cells(record: StepRecord) -> dict[str, str]:
    """Request → what it did in a step, in a few words."""
    cells: dict[str, str] = {}
    for name, ran in record["ran"].items():
        several = f" ×{ran['sequences']}" if ran["sequences"] > 1 else ""
        if ran["kind"] in ("decode", "beam"):
            cells[name] = f"{ran['kind']}{several}"
        else:
            start = f"{ran['start']}+" if ran["start"] else ""
            cells[name] = f"{ran['kind']} {start}{ran['count']} of {ran['of']}{several}"
        if name in record["swapped_in"]:
            cells[name] = f"swapped in, {cells[name]}"
    for queue in ("waiting", "swapped"):
        for name, reason in record[queue].items():
            cells[name] = f"{queue}: {WaitReason(reason).text}" if reason else queue
    for name in record["idle"]:
        cells[name] = "idle"
    for preemption in record["preempted"]:
        name, cause = preemption["request"], preemption["for"]
        how = "preempted" if preemption["mode"] == "recompute" else "swapped out"
        cells[name] = f"{how} by {cause}" if cause != name else f"{how}: {WaitReason.NO_FREE_BLOCKS.text}"
    for name, outcome in record["finished"].items():
        end = f"end: {'/'.join(outcome['finish_reasons'])}"
        cells[name] = f"{cells[name]} → {end}" if name in cells else end
    return cells


def step_kinds(record: StepRecord) -> dict[str, str]:
    """Request → what it did in a step: a RunKind, waiting, swapped, idle, preempted or ended."""
    kinds = dict.fromkeys(record["finished"], "ended")
    kinds |= {name: ran["kind"] for name, ran in record["ran"].items()}
    kinds |= {name: queue for queue in ("waiting", "swapped") for name in record[queue]}
    kinds |= dict.fromkeys(record["idle"], "idle")
    kinds |= {preemption["request"]: "preempted" for preemption in record["preempted"]}
    return kinds
