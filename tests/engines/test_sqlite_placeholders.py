"""What Python 3.12 says about SQL that earlier versions took."""

from __future__ import annotations

import inspect
import re

from fencelock.engines.sqlite import database, opening, queue, rates, records, transactions


def test_no_numbered_placeholders() -> None:
    """Python 3.12.0 to 3.12.3 warn about ?1 with a sequence of arguments, which ends a program run with -W error."""
    for module in (database, opening, queue, rates, records, transactions):
        assert re.findall(r"\?\d", inspect.getsource(module)) == []
