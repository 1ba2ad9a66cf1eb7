"""The statements, from a file for each dialect: `-- name: what it promises`, then the statement."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

SECTION = re.compile(r"^-- (\w+): .*\n((?:-- .*\n)*)", re.MULTILINE)
MARIADB_ONLY = re.compile(r"/\*M!.*?\*/", re.DOTALL)


@cache
def statements(dialect: str) -> dict[str, str]:
    """Return the statements of a dialect by their names."""
    text = (Path(__file__).parent / f"{dialect}.sql").read_text("utf-8")
    found = list(SECTION.finditer(text))
    ends = [start.start() for start in found[1:]] + [len(text)]
    sections = {start[1]: text[start.end() : end].strip() for start, end in zip(found, ends, strict=True)}
    sections["unbounded"] = MARIADB_ONLY.sub("", sections["check"]).strip()
    return sections


def schema(dialect: str) -> list[str]:
    """Return the statements that make what a fence needs in a database.

    >>> schema("sqlite")[0].splitlines()[0]
    'CREATE TABLE IF NOT EXISTS fencelock_fence ('
    """
    all_of_them = statements(dialect)
    return [all_of_them[name] for name in ("schema", "floor") if name in all_of_them]
