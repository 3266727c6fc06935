"""Generate docs/settings.md from the declarations in EngineConfig.

python docs/make_settings.py
"""

import argparse
from itertools import groupby
from pathlib import Path

from treadle.assembly.engine_config import EngineConfig
from treadle.cli.options import option_name
from treadle.core.settings import Setting, settings_of

PAGE = Path(__file__).parent / "settings.md"

TOP = """# Settings

Keyword arguments of `LLM(…)` and options of `treadle generate`, `chat` and `serve`. Each setting is declared once, in
`EngineConfig` (`src/treadle/assembly/engine_config.py`) or in `SchedulingSettings` (`src/treadle/core/config.py`);
`make docs` generates this page from the declarations. `generate` and `chat` have no option for the setting `seed`:
their `--seed` sets the seed of the request. An invalid value raises a `ConfigError` that names the setting, the value
and the limit.
"""


def page() -> str:
    """Return the text of docs/settings.md."""
    parts = [TOP]
    for group, entries in groupby(settings_of(EngineConfig).items(), key=lambda entry: entry[1].group):
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n\n")
        parts.append("| keyword | option | default | what it does |\n|---|---|---|---|\n")
        parts += [_row(name, declared) for name, declared in entries]
    return "".join(parts)


def _row(name: str, declared: Setting) -> str:
    unnamed = [choice for choice in declared.choice_texts if choice not in declared.help]
    choices = f" ({', '.join(declared.choice_texts)})" if unnamed else ""
    cells = (f"`{name}`", f"`{option_name(name)}`", declared.default_in_words, declared.help + choices)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
