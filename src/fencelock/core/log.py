"""What fencelock logs: loggers below `fencelock`, with the lock's name, token and the like in `extra`."""

from __future__ import annotations

from typing import Any

INFO, WARNING, ERROR = 20, 30, 40  # as in logging, which costs a tenth of the start of `fencelock run`


def log(logger: str, level: int, message: str, *, error: BaseException | None = None, **fields: Any) -> None:
    """Log a message that nobody is there to be returned. `fields` become attributes of the record."""
    import logging

    logging.getLogger(f"fencelock.{logger}").log(level, "%s", message, exc_info=error, extra=fields)
