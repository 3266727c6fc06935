"""The page that visualizes the scheduler: served live by the server, or a single file that embeds a recording.

Plain HTML, CSS and JavaScript modules without a build step. uPlot (static/vendor) draws the charts.
"""

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}

# The browser loads and runs only the page's own files, so that a string from a client can never become code.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_IMPORT = re.compile(r'(from|import) "\./(\w+\.js)"')
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([\w./]+)">')
_SCRIPT = re.compile(r'<script src="page/([\w./]+)"></script>')


@cache
def static_files() -> Mapping[str, str]:
    """Return the page's files: path below static/ → text. No other file is ever served."""
    found = {}
    for folder, names in ((files(__package__) / "static", ""), (files(__package__) / "static" / "vendor", "vendor/")):
        for entry in folder.iterdir():
            if entry.is_file() and entry.name.rpartition(".")[2] in CONTENT_TYPES:
                found[names + entry.name] = entry.read_text(encoding="utf-8")
    return found


def standalone_page(name: str, lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a self-contained HTML file that shows a recording.

    Args:
        name: name of the recording.
        lines: the header of the recording, then one record per step.
    """
    parts = dict(static_files())
    page = parts.pop("index.html")
    modules = {
        f"treadle/{path}": "data:text/javascript;base64,"
        + base64.b64encode(_IMPORT.sub(r'\1 "treadle/\2"', text).encode()).decode()
        for path, text in parts.items()
        if path.endswith(".js") and "/" not in path
    }
    # JavaScript sorts numeric object keys; a list keeps the order of the queue.
    lines = [
        {key: list(value.items()) if key in ("waiting", "swapped") else value for key, value in line.items()}
        for line in lines
    ]
    # A "</" in the data would end the script element.
    data = json.dumps(lines, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    head = (
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
        f'<script type="application/json" id="recording" data-name="{html.escape(name)}">{data}</script>\n'
    )
    page = _STYLE.sub(lambda match: f"<style>\n{parts[match[1]]}</style>", page)
    page = _SCRIPT.sub(lambda match: f"<script>{parts[match[1]]}</script>", page)
    main = '<script type="module" src="page/app.js"></script>'
    return page.replace(main, head + '<script type="module">import "treadle/app.js";</script>')
