"""Import directions between packages, and packages that load without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import treadle

SOURCE = Path(treadle.__file__).parent

# The rooms in the order in which data flows; a room imports only rooms above it.
ROOMS = [
    {"_version"},
    {"core"},
    {"kvcache"},
    {"scheduler"},
    {"engine"},
    {"trace"},
    {"text"},
    {"models"},
    {"backends"},
    {"runner"},
    {"assembly"},
    {"llm"},
    {"page", "loadgen"},
    {"server"},
    {"cli"},
    {"__main__", "testing"},
]
WITHOUT_TORCH = [
    "kvcache",
    "scheduler",
    "engine",
    "trace",
    "text",
    "assembly.engine_config",
    "core.sampling_params",
    "core.request",
    "cli.parser",
]


def room_of(module):
    return module.removeprefix("treadle").lstrip(".").split(".")[0]


def level(room):
    return next(i for i, rooms in enumerate(ROOMS) if room in rooms)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("treadle"):
            yield from (
                [f"treadle.{alias.name}" for alias in node.names] if node.module == "treadle" else [node.module]
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("treadle."))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_above_it(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    for module in imports(path):
        other = room_of(module)
        if other in ("LLM", "SamplingParams", "__version__"):
            other = {"LLM": "llm", "SamplingParams": "core", "__version__": "_version"}[other]
        assert level(other) < level(room) or other == room, f"{room} imports {other}"


@pytest.mark.parametrize(
    "path",
    sorted([*(SOURCE / "runner").rglob("*.py"), *(SOURCE / "backends").rglob("*.py")]),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_runners_and_backends_do_not_import_requests(path):
    """Runners and backends get all information about sequences from plans."""
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("treadle")
        for alias in node.names
    }
    assert not names & {"Request", "Sequence", "RunningBatch", "Scheduler"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_these_modules_import_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import treadle.{module}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_public_names_exist():
    for name in treadle.__all__:
        assert getattr(treadle, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = treadle.nothing
    assert set(treadle.__all__) <= set(dir(treadle))
