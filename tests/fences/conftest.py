"""The databases of the fences' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.mariadb import MariaDB
from tests.engines.postgres import Postgres
from tests.fences.callers import Where


@pytest.fixture
def where(postgres: Postgres, mariadb: MariaDB, tmp_path: Path) -> Where:
    """The servers that all tests share, and a folder for SQLite."""
    return Where(postgres, mariadb, tmp_path)
