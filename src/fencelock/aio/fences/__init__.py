"""The fences, awaited: the same classes as in `fencelock.fences`."""

from fencelock.fences import Fenced, TokenPair, from_environ

__all__ = ["Fenced", "TokenPair", "from_environ"]
