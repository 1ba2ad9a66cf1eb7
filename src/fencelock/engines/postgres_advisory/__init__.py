"""`postgresql+advisory://`: the server's own advisory locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.postgres import schema_for
from fencelock.engines.postgres.url import parse

if TYPE_CHECKING:
    from fencelock.core.engine import Engine
    from fencelock.core.runtime import Runtime

__all__ = ["connect", "schema_for"]


def connect(runtime: Runtime, url: str, namespace: str) -> Engine:
    """Open the engine that uses advisory locks."""
    from fencelock.engines.postgres_advisory.engine import AdvisoryEngine

    return AdvisoryEngine(runtime, parse(url), namespace)
