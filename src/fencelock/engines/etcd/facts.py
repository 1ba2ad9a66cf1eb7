"""What a client has learned about its cluster: for the log at once, and for `doctor` later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fencelock.engines.etcd.messages import Header

NOTES_KEPT = 100


class Facts:
    """The cluster as its answers show it. One per client, and the only place that looks at headers."""

    def __init__(self, on_changed: Callable[[], None]) -> None:
        self._on_changed = on_changed
        """Called when the cluster's past is not what it was."""
        self.cluster = 0
        self.revision = 0
        """The highest revision that an answer from a majority has shown."""
        self.notes: deque[str] = deque(maxlen=NOTES_KEPT)
        """What people should know, oldest first."""

    def take(self, header: Header, floor: int) -> None:
        """Take in the header of an answer for which a majority was asked; `floor` is `revision` when it was asked for.

        A revision that is lower than one seen before the question was asked can only mean that the past was changed.
        """
        if header.cluster != self.cluster:
            before, self.cluster = self.cluster, header.cluster
            if before:
                self.revision = 0
                self.note(
                    f"the cluster is not the one that it was ({before:x}, now {header.cluster:x}): locks are gone"
                )
                self._on_changed()
        elif header.revision < floor <= self.revision:  # else somebody else has noticed meanwhile
            self.revision = 0
            self.note(
                f"the cluster went back from revision {floor} to {header.revision}, as when it is restored from a backup: "
                "locks may be gone, and tokens that clients got before they learn of it can repeat. "
                "Restore with --bump-revision --mark-compacted"
            )
            self._on_changed()
        if header.revision > self.revision:
            self.revision = header.revision

    def note(self, words: str) -> None:
        """Remember it, and log it as a warning."""
        import logging  # which few ever need, and costs more than all the rest

        self.notes.append(words)
        logging.getLogger("fencelock").warning("etcd: %s", words)
