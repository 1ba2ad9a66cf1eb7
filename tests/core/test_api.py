"""The public API: its blocking and asyncio halves agree, all names have docstrings, and the examples there run."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import aio

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(fencelock.__path__, "fencelock.")
    if not module.name.endswith("__main__")
)

TWINS = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def plain(annotation: Any) -> str:
    """Return an annotation without its runtime."""
    text = str(annotation).replace("AsyncIterator", "Iterator")
    return re.sub(r"(?:Awaitable\[|Coroutine\[Any, Any, )(\w+|list\[\w+\])\]", r"\1", text)


def signature(function: Any) -> list[tuple[str, Any, str, str]]:
    """Return what callers see of a function, without its runtime."""
    seen = inspect.signature(function)
    parameters = [
        (parameter.name, parameter.kind, repr(parameter.default), plain(parameter.annotation))
        for parameter in seen.parameters.values()
    ]
    return [*parameters, ("return", None, "", plain(seen.return_annotation))]


@pytest.mark.parametrize("name", aio.__all__)
def test_blocking_and_asyncio_apis_agree(name: str) -> None:
    """Both APIs have the same names with the same parameters, defaults and types; only the awaiting differs."""
    one, other = getattr(fencelock, name), getattr(aio, name)
    if inspect.isfunction(one):
        assert signature(one) == signature(other)
        return
    ours = {key: value for key, value in vars(one).items() if callable(value) or isinstance(value, property)}
    theirs = {key: value for key, value in vars(other).items() if callable(value) or isinstance(value, property)}
    assert {TWINS.get(key, key) for key in ours} == set(theirs)
    for key, value in ours.items():
        twin = theirs[TWINS.get(key, key)]
        assert isinstance(value, property) == isinstance(twin, property), key
        if not isinstance(value, property) and key != "__init__":
            assert signature(value) == signature(twin), key


def test_all_lists_the_public_names() -> None:
    """Every name in `__all__` exists in both modules, and no other name is public."""
    for name in fencelock.__all__:
        assert getattr(fencelock, name).__module__.startswith("fencelock."), name
    assert set(aio.__all__) <= set(fencelock.__all__)
    assert sorted(fencelock.__all__) == list(fencelock.__all__)
    assert set(fencelock.__all__) <= set(dir(fencelock))
    with pytest.raises(AttributeError, match="nosuchname"):
        _ = fencelock.nosuchname  # type: ignore[attr-defined]


def test_public_names_have_docstrings() -> None:
    """Every public class, function and method has a docstring."""
    for thing in {getattr(module, name) for module in (fencelock, aio) for name in module.__all__}:
        assert thing.__doc__, thing
        for key, value in inspect.getmembers(
            thing, lambda value: inspect.isfunction(value) or isinstance(value, property)
        ):
            if not key.startswith("_"):
                assert inspect.getdoc(value), f"{thing}.{key}"


def test_modules_have_docstrings() -> None:
    """Every module has a docstring, and so have its public functions and classes."""
    assert MODULES
    for name in MODULES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        assert ast.get_docstring(tree), name
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                assert ast.get_docstring(node), f"{name}.{node.name}"


def test_examples_in_docstrings_run() -> None:
    """The examples in docstrings run and print what they show."""
    for name in ("fencelock", *MODULES):
        module = importlib.import_module(name)
        outcome = doctest.testmod(module, extraglobs={"asyncio": asyncio, "fencelock": fencelock})
        assert outcome.failed == 0, name


def test_public_classes_have_examples() -> None:
    """Every public class and `connect` has an example, in both APIs."""
    for half in (fencelock, aio):
        for name in aio.__all__:
            assert ">>>" in (getattr(half, name).__doc__ or ""), f"{half.__name__}.{name}"


def test_asyncio_half_is_an_attribute_of_the_package() -> None:
    """`import fencelock` is enough for `fencelock.aio.connect`."""
    program = "import fencelock; fencelock.aio.connect"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
