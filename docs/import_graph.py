"""Prints the graph of imports between rooms: the packages and modules directly under src/treadle.

python docs/import_graph.py            rooms, floors, arrows and circles
python docs/import_graph.py --arrows   every arrow, too
"""

import argparse
import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "treadle"


def room_of(module: str) -> str:
    """The room of a module's full name."""
    name = module.removeprefix("treadle").lstrip(".").split(".")[0]
    return {"LLM": "llm", "SamplingParams": "core", "__version__": "_version"}.get(name, name)


def imports(path: Path) -> set[str]:
    """Rooms that a file imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "treadle":
            names = [f"treadle.{alias.name}" for alias in node.names] if node.module == "treadle" else [node.module]
            rooms |= {room_of(name) for name in names}
    return rooms


def import_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Room → rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        if room != "__init__":
            graph.setdefault(room, set()).update(imports(path) - {room, ""})
    return graph


def strip_floors(graph: dict[str, set[str]]) -> tuple[list[list[str]], set[str]]:
    """Floors from the lowest up, each with the rooms that import only lower ones; and the rooms in circles."""
    floors: list[list[str]] = []
    placed: set[str] = set()
    while floor := [room for room, others in graph.items() if room not in placed and others <= placed]:
        floors.append(floor)
        placed |= set(floor)
    return floors, graph.keys() - placed


def main() -> None:
    """Print the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arrows", action="store_true")
    args = parser.parse_args()
    graph = import_graph()
    floors, circles = strip_floors(graph)
    num_arrows = sum(map(len, graph.values()))
    print(f"{len(graph)} rooms, {len(floors)} floors, {num_arrows} arrows, {len(circles)} rooms in circles")
    for number, floor in enumerate(floors, start=1):
        print(f"{number:>3}  {'  '.join(floor)}")
    if circles:
        print("circles:", "  ".join(sorted(circles)))
    if args.arrows:
        for room, others in graph.items():
            print(f"{room} → {', '.join(sorted(others)) or 'nothing'}")


if __name__ == "__main__":
    main()
