"""Engines of other packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fencelock

ENGINE = """
from fencelock.engines import memory


def connect(runtime, url, namespace):
    return memory.connect(runtime, "memory://" + url.partition("://")[2], namespace)
"""
METADATA = "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers the scheme `elsewhere`."""
    (tmp_path / "elsewhere_engine.py").write_text(ENGINE)
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[fencelock.engines]\nelsewhere = elsewhere_engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "elsewhere_engine", raising=False)


@pytest.mark.usefixtures("installed")
def test_entry_point_opens_the_engine_of_another_package() -> None:
    """A scheme that another package registered under `fencelock.engines` opens its engine."""
    with fencelock.connect("elsewhere://name") as locks, locks.lock("x") as lease:
        assert lease.token > 0


def test_scheme_without_its_package_is_refused() -> None:
    """The same URL is refused if the package is not installed."""
    with pytest.raises(fencelock.FencelockError, match="elsewhere"):
        fencelock.connect("elsewhere://name")
