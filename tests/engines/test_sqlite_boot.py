"""Claims are void after another start of the machine, so everybody has to mean the same start."""

from __future__ import annotations

from pathlib import Path

import pytest

import fencelock
from fencelock.core import clock


def test_process_that_cannot_tell_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot read the boot id, as a service with ProcSubset=pid, is refused and does not void what others hold."""
    url = f"sqlite:///{tmp_path}/locks.db"
    with fencelock.connect(url) as locks, locks.lock("x") as lease:
        with monkeypatch.context() as patch, pytest.raises(fencelock.EngineUnavailable, match="ProcSubset"):
            patch.setattr(clock, "BOOT_ID", str(tmp_path / "missing"))
            with fencelock.connect(url) as others:
                others.lock("x").try_acquire()
        lease.renew()
        assert locks.lock("x").try_acquire() is None
