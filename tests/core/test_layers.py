"""Imports point downwards only, and asyncio is known in one place: architecture that a machine can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fencelock

ROOT = Path(fencelock.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What each part may import, besides itself and the standard library. A part that is not here yet has to be added.
BASE = {"errors", "model"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"model"},  # for a type only
    "model": set(),
    "core": BASE,
    "runtime": BASE | {"core"},
    "engines": BASE | {"core"},
    "primitives": BASE | {"core"},
    "sqlio": {"errors"},
    "fences": {"errors", "sqlio", "runtime"},
    "lockfree": BASE | {"core", "runtime", "primitives", "fences", "sqlio"},
    "api": BASE | {"core", "runtime", "primitives"},
    "sim": BASE | {"core", "runtime", "engines", "primitives", "fences"},
    "cli": BASE | {"core", "runtime", "api", "primitives", "aio", "sqlio", "fences", "lockfree", "sim", "web", ""},
    "web": BASE | {"core", "runtime", "api", "primitives", "aio", "fences", "sim", ""},
    "aio": BASE | {"api", "primitives", "runtime", "fences", "lockfree", "sqlio"},
    "__main__": {"cli"},
    "": BASE | {"api", "primitives"},
}

# Only these know that asyncio exists.
ASYNCIO = ("runtime/asyncio", "web/", "sim/", "cli/", "runtime/both_apis.py", "aio/fences/file.py")


def part_of(module: str) -> str:
    """Return which part of fencelock a module belongs to; "" is the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def imports(path: Path) -> list[str]:
    """Return the absolute names of all modules that a file imports, wherever in it."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            if node.module == "fencelock":
                yield from (f"fencelock.{alias.name}" for alias in node.names)
            else:
                yield node.module


def module_of(path: Path) -> str:
    """Return a file's dotted name."""
    names = ("fencelock", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_imports_point_downwards() -> None:
    """A file imports only its own layer and the layers below."""
    assert FILES
    for path in FILES:
        mine = part_of(module_of(path))
        assert mine in MAY_IMPORT, f"{mine} is new: say in MAY_IMPORT what it may import"
        for name in imports(path):
            if name.partition(".")[0] != "fencelock":
                continue
            other = part_of(name)
            if not (ROOT / other).is_dir() and not (ROOT / f"{other}.py").is_file():
                other = ""  # a public name of the package itself
            assert other == mine or other in MAY_IMPORT[mine], f"{path}: {mine} must not import {name}"


BUILDS_ON = {"redlock": "redis", "postgres_advisory": "postgres", "memory": "memory_records"}
"""Engines that speak to the same server as another one, and an engine in two files."""


def test_engines_do_not_import_each_other() -> None:
    """An engine imports no other engine except the one that it builds on."""
    for path in FILES:
        mine = module_of(path).split(".")[:3]
        for name in imports(path):
            if mine[1:2] == ["engines"] and name.startswith("fencelock.engines."):
                other = name.split(".")[2]
                assert other in (mine[2], BUILDS_ON.get(mine[2])), f"{path} imports {name}"


def test_core_and_engines_do_not_import_asyncio() -> None:
    """The core, the engines, the primitives and the API files do not import asyncio."""
    for path in FILES:
        if not str(path.relative_to(ROOT)).startswith(ASYNCIO):
            assert "asyncio" not in {name.partition(".")[0] for name in imports(path)}, path


def test_blocking_api_does_not_import_asyncio() -> None:
    """The blocking API does not import asyncio."""
    import subprocess
    import sys

    program = (
        "import sys, fencelock\n"
        "with fencelock.connect('memory://x') as locks, locks.lock('x'): pass\n"
        "sys.exit('asyncio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
