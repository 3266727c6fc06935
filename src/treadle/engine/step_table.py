"""The picture of a schedule: what each request did in each step, as a table of text."""

from collections.abc import Iterable

from treadle.request import Request
from treadle.scheduler import StepPlan


class StepTable:
    """Writes down what every request did in every step, and draws it.

    Rows are steps, columns are requests in order of arrival. Steps in which everybody did the same as in
    the one before are drawn as one row.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._rows: list[tuple[int, int, dict[str, str]]] = []

    def on_schedule(self, plan: StepPlan, waiting: Iterable[Request]) -> None:
        """Write down what the step does."""
        cells: dict[str, str] = {}
        sequences = plan.batch.sequences
        for scheduled in plan.sequences:
            seq = sequences[scheduled.row]
            again = "re-prefill" if seq.num_output_tokens else "prefill"
            done = f"{scheduled.count} of {seq.num_tokens}"
            if scheduled.start:
                done = f"{scheduled.start}+{done}"
            cells[scheduled.request_id] = f"{again} {done}"
        for seq in sequences[plan.decode_rows]:
            cells[seq.request.request_id] = "decode"
        waiting = list(waiting)
        for request in waiting:
            cells[request.request_id] = "waiting"
        if plan.refusal is not None:
            cells[plan.refusal.request_id] = f"waiting: {plan.refusal.reason.value}"
        for seq in plan.batch.running_sequences():
            cells.setdefault(seq.request.request_id, "idle")
        for preemption in plan.preempted:
            by = preemption.for_request_id
            cells[preemption.request_id] = (
                f"preempted by {by}" if by != preemption.request_id else "preempted: no free blocks"
            )
        known = set(self._columns)
        requests = [*plan.batch.running_sequences(), *(r.sequences[0] for r in waiting)]
        new = {seq.request.request_id: seq.request.arrival_number for seq in requests}
        self._columns += sorted(new.keys() - known, key=new.__getitem__)
        self._rows.append((plan.step, plan.num_batched_tokens, cells))

    def on_update(self, plan: StepPlan, finished: Iterable[Request]) -> None:
        """Write down who ended with the step."""
        cells = self._rows[-1][2]
        for request in finished:
            done = cells.get(request.request_id)
            if done is not None:
                reason = request.sequences[0].finish_reason
                cells[request.request_id] = f"{done} → end: {reason}"

    def render(self) -> str:
        """The table, as lines of text."""
        merged: list[tuple[int, int, int, dict[str, str]]] = []
        for step, num_tokens, cells in self._rows:
            if merged and merged[-1][2:] == (num_tokens, cells):
                merged[-1] = (merged[-1][0], step, num_tokens, cells)
            else:
                merged.append((step, step, num_tokens, cells))
        lines = [["step", "tokens", *self._columns]]
        for first, last, num_tokens, cells in merged:
            steps = str(first) if first == last else f"{first}-{last}"
            lines.append([steps, str(num_tokens), *(cells.get(name, "") for name in self._columns)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        lines.insert(1, ["─" * width for width in widths])
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i < 2 and "─" not in cell else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
