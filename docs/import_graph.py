"""Print the import graph of the rooms, which are the packages and modules directly under src/treadle.

python docs/import_graph.py           layers, and the numbers of edges and cycles
python docs/import_graph.py --edges   also every edge
"""

import argparse
import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "treadle"


def room_of(module: str) -> str:
    """Return the room of a module, given its full name."""
    name = module.removeprefix("treadle").lstrip(".").split(".")[0]
    return {"LLM": "llm", "SamplingParams": "core", "__version__": "_version"}.get(name, name)


def imports(path: Path) -> set[str]:
    """Return the rooms that a file imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "treadle":
            names = [f"treadle.{alias.name}" for alias in node.names] if node.module == "treadle" else [node.module]
            rooms |= {room_of(name) for name in names}
    return rooms


def import_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return room → imported rooms."""
    graph: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        if room != "__init__":
            graph.setdefault(room, set()).update(imports(path) - {room, ""})
    return graph


def split_into_layers(graph: dict[str, set[str]]) -> tuple[list[list[str]], set[str]]:
    """Return the layers from the lowest up (rooms import only lower layers), and the rooms in or above a cycle."""
    layers: list[list[str]] = []
    placed: set[str] = set()
    while layer := [room for room, others in graph.items() if room not in placed and others <= placed]:
        layers.append(layer)
        placed |= set(layer)
    return layers, graph.keys() - placed


def main() -> None:
    """Print the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--edges", action="store_true")
    args = parser.parse_args()
    graph = import_graph()
    layers, cyclic = split_into_layers(graph)
    num_edges = sum(map(len, graph.values()))
    print(f"{len(graph)} rooms, {len(layers)} layers, {num_edges} edges, {len(cyclic)} rooms in or above a cycle")
    for number, layer in enumerate(layers, start=1):
        print(f"{number:>3}  {'  '.join(layer)}")
    if cyclic:
        print("in or above a cycle:", "  ".join(sorted(cyclic)))
    if args.edges:
        for room, others in graph.items():
            print(f"{room} → {', '.join(sorted(others)) or 'nothing'}")


if __name__ == "__main__":
    main()
