"""What fencelock logs: loggers below `fencelock`, with the lock's name, token and the like in `extra`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

INFO, WARNING, ERROR = 20, 30, 40  # as in logging, which costs a tenth of the start of `fencelock run`

sink: Callable[[str, int, str], None] | None = None
"""Takes the logger, level and message instead of `logging`: the command line writes to stderr itself."""


def log(logger: str, level: int, message: str, *, error: BaseException | None = None, **fields: Any) -> None:
    """Log what no caller is there to receive. `fields` become attributes of the record."""
    with suppress(Exception):  # a handler that fails must not end the renewer
        if sink is not None:
            sink(logger, level, message)
            return
        import logging

        logging.getLogger(f"fencelock.{logger}").log(level, "%s", message, exc_info=error, extra=fields)
