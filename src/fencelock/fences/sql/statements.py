"""The SQL statements, from one file for each dialect: `-- name: what it does`, then the statement."""

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
    sections["check_without_timeout"] = MARIADB_ONLY.sub("", sections["check"]).strip()
    return sections


def schema(dialect: str) -> list[str]:
    """Return the statements that create the table of the fence.

    >>> schema("sqlite")[0].splitlines()[0]
    'CREATE TABLE IF NOT EXISTS fencelock_fence ('
    """
    sections = statements(dialect)
    return [sections[name] for name in ("schema", "min_token") if name in sections]
