"""Data that merges: the same classes as in `fencelock.lockfree.crdt`; nothing of them waits, so nothing is awaited."""

from fencelock.lockfree.crdt import ClockAhead, GCounter, HybridClock, LWWRegister, ORSet, PNCounter, Stamp

__all__ = ["ClockAhead", "GCounter", "HybridClock", "LWWRegister", "ORSet", "PNCounter", "Stamp"]
