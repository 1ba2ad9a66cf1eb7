"""What the tests of engines with servers share: both colours, and clients that are closed at the end of the test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.colours import COLOURS, LocksView
from tests.contract.subject import Subject


class Clients:
    """Makes clients of one colour, for any URL; whatever is opened is closed at the end of the test."""

    def __init__(self, colour: str) -> None:
        self.colour = colour
        self._subjects: list[Subject] = []

    def on(self, url: str) -> Subject:
        """Return the engine at the URL, in this colour."""
        self._subjects.append(Subject(url, self.colour))
        return self._subjects[-1]

    def connect(self, url: str, **options: Any) -> LocksView:
        """Return a client."""
        return self.on(url).connect(**options)

    async def finish(self) -> None:
        """Close whatever was opened."""
        for subject in self._subjects:
            await subject.finish()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for a colour in both."""
    if "colour" in metafunc.fixturenames:
        metafunc.parametrize("colour", COLOURS)


@pytest.fixture
def clients(colour: str) -> Clients:
    """Clients of either colour."""
    return Clients(colour)
