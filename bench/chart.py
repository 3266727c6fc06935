"""Draws the chart in the README from the table in docs/performance.md: decode tokens/s with 1 and with 32 requests.

    python bench/chart.py

Measures nothing. Writes docs/images/decode.svg and decode-dark.svg; run it after a change to the table.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"

PANELS = {"a 1 × (128 + 64), decode": "1 request", "a 32 × (128 + 64), decode": "32 requests"}
"""Rows of the table, and their titles."""

THEMES = {
    "decode.svg": {"text": "#1f2328", "muted": "#59636e", "ours": "#0969da", "peer": "#afb8c1"},
    "decode-dark.svg": {"text": "#f0f6fc", "muted": "#9198a1", "ours": "#4493f8", "peer": "#57606a"},
}

WIDTH, TOP, ROW, BAR = 820, 58, 26, 16
LABEL_WIDTH, PANEL_WIDTH, GAP, VALUE_WIDTH = 220, 275, 40, 46


def read_table(text: str) -> tuple[list[str], dict[str, list[float]]]:
    """Engines, and tokens/s of each by workload, from the first table with a "workload" column."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| workload |"))
    engines = _cells(lines[start])[1:]
    figures = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        workload, *values = _cells(line)
        figures[workload] = [float(value.split()[0].replace(",", "")) for value in values]
    return engines, figures


def draw(engines: list[str], figures: dict[str, list[float]], color: dict[str, str]) -> str:
    """The chart as SVG: a panel per row of PANELS, a bar per engine, each panel with its own scale."""
    height = TOP + ROW * len(engines) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="13">',
        f"<title>{_summary(engines, figures)}</title>",
        _text(0, 16, "Decode tokens/s (higher is better): SmolLM2-135M, two CPU cores", color["text"], weight=600),
    ]
    for number, engine in enumerate(engines):
        ink = color["text"] if _is_ours(engine) else color["muted"]
        parts.append(_text(LABEL_WIDTH - 10, _middle(number), engine, ink, anchor="end"))
    for panel, (workload, title) in enumerate(PANELS.items()):
        left = LABEL_WIDTH + panel * (PANEL_WIDTH + GAP)
        parts.append(_text(left, TOP - 14, title, color["muted"]))
        scale = (PANEL_WIDTH - VALUE_WIDTH) / max(figures[workload])
        for number, (engine, value) in enumerate(zip(engines, figures[workload], strict=True)):
            length, fill = value * scale, color["ours" if _is_ours(engine) else "peer"]
            parts += [
                f'<rect x="{left}" y="{TOP + ROW * number + (ROW - BAR) // 2}" width="{length:.1f}" height="{BAR}" '
                f'rx="2" fill="{fill}"/>',
                _text(left + length + 6, _middle(number), f"{value:,.0f}", color["text"]),
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _summary(engines: list[str], figures: dict[str, list[float]]) -> str:
    panels = []
    for workload, title in PANELS.items():
        values = zip(engines, figures[workload], strict=True)
        panels.append(f"{title}: " + "; ".join(f"{engine} {value:,.0f}" for engine, value in values))
    return "Decode tokens/s. " + ". ".join(panels)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _is_ours(engine: str) -> bool:
    return engine.startswith("Treadle")


def _middle(number: int) -> int:
    return TOP + ROW * number + ROW // 2


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}" '
        f'dominant-baseline="central">{text}</text>'
    )


def main() -> None:
    engines, figures = read_table(TABLE.read_text(encoding="utf-8"))
    for name, color in THEMES.items():
        (IMAGES / name).write_text(draw(engines, figures, color), encoding="utf-8")


if __name__ == "__main__":
    main()
