"""The type of the client that a fence is made with: for type checkers, it says whether the fence is to be awaited.

A method of such a fence has three overloads. The first is for a client that they know nothing about (only Any passes for
Never), and there they know nothing of the answer either; the others are for a client to be awaited and one that blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing's own has a default from Python 3.13 on

    ClientT = TypeVar("ClientT", covariant=True, default=Any)
else:
    from typing import TypeVar

    ClientT = TypeVar("ClientT", covariant=True)
