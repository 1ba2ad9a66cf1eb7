"""Count the code lines of src/fencelock by folder, without blank lines, comments and docstrings.

`python -m scripts.code_lines` counts this tree; `python -m scripts.code_lines PATH` counts another copy of `src/fencelock`.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src/fencelock"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMMENTS = {".lua": "--", ".sql": "--"}
"""Files besides Python that count as code, with the mark that begins a comment."""


def python_lines(text: str) -> int:
    """Return the number of lines with code; a string that stands alone as a statement is documentation.

    >>> python_lines('\"\"\"Doc.\"\"\"\\n\\n# comment\\nx = (  # why\\n    1\\n)\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def plain_lines(text: str, comment: str) -> int:
    """Return the number of lines that are neither blank nor a comment."""
    return sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith(comment))


def code_lines(path: Path) -> int:
    """Return the number of code lines of a file."""
    text = path.read_text(encoding="utf-8")
    return python_lines(text) if path.suffix == ".py" else plain_lines(text, COMMENTS[path.suffix])


def folder_of(path: Path) -> str:
    """Return the part of the tree that a file counts for: its folder, or each engine by itself.

    >>> folder_of(Path("core/lease.py")), folder_of(Path("engines/redis/pool.py")), folder_of(Path("model.py"))
    ('core', 'engines/redis', '.')
    """
    parts = path.parts
    if parts[0] == "engines" and len(parts) > 1:
        return f"engines/{Path(parts[1]).stem}"
    return parts[0] if len(parts) > 1 else "."


def main(source: Path) -> None:
    """Print the code lines of each folder and their sum."""
    totals: Counter[str] = Counter()
    for path in sorted(source.rglob("*")):
        if path.suffix == ".py" or path.suffix in COMMENTS:
            totals[folder_of(path.relative_to(source))] += code_lines(path)
    for folder, lines in sorted(totals.items()):
        sys.stdout.write(f"{lines:7,}  {folder}\n")
    sys.stdout.write(f"{totals.total():7,}  all\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
