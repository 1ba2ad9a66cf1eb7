"""The object-store fence: a put that names the version it was made from, as S3 and its like take it (`If-Match`).

The mark is kept with the object, in its metadata. What is written is bound to what was read, by its ETag: so nothing is
entered beforehand. If somebody older has written between read and put, the change is made anew from what that left; if
somebody newer, it is refused.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError, GuaranteeUnavailable, VersionConflict
from fencelock.fences import Fenced
from fencelock.fences.core import (
    Credentials,
    Mark,
    admit,
    bearer,
    check_reason,
    check_resource,
    check_token,
    tell_moved,
    token_of,
)

METADATA = "fencelock"
PUT_ID = "fencelock-put"
"""Which put it was, in the metadata: a reply can be lost, and the driver's own repetition then finds the condition unmet."""

ATTEMPTS = 20
LONGEST_PAUSE = 0.5
PROBE = ".fencelock-probe"
CONFLICTS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"}
"""What a store says when a condition is not met. 409: another conditional put was under way; 404: the object is gone."""


class Stored(NamedTuple):
    """An object as it was read. If there is none, it has no ETag (None) and an empty body."""

    body: bytes
    etag: str | None
    mark: Mark | None
    more: dict[str, Any]
    put: str = ""


class ObjectFence:
    """Changes objects of a bucket, and refuses whoever comes with an older token than somebody before.

    `client` is a boto3 S3 client, or whatever else has its `get_object` and `put_object` and obeys `IfMatch` and
    `IfNoneMatch`.

    S3's ETag is the digest of the content: after a newer holder has put back exactly what an older one had read, the older
    one's put goes through. Nothing is lost by it, as it was made from what is there; but if that must not be, have the mark
    made part of the content: `stamp(body, mark)` returns the body to be stored.

    A store that ignores conditions does not say so. Therefore the first write is preceded by a put, beside the object, whose
    condition cannot be met, and the first object that is made is made a second time: one that lets either through is refused
    (GuaranteeUnavailable). `probe=False` leaves that out, for those who may write nowhere else and know their store.

    >>> def sell(client: S3Client, lease: fencelock.Lease) -> None:
    ...     fence = ObjectFence(client, "shop")
    ...     fence.update(lease, "apples", lambda body: str(int(body) - 5).encode())
    """

    def __init__(
        self, client: Any, bucket: str, *, stamp: Callable[[bytes, str], bytes] | None = None, probe: bool = True
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._stamp = stamp
        self._obeyed = set[str]() if probe else {"IfMatch", "IfNoneMatch"}

    def update(self, lease: Fenced, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Read an object, have it changed, and put it back; return what was put, or raise StaleToken.

        `change` takes the content, or None if there is none, and may be called more than once.
        """
        tried = 0
        while True:
            seen = self.read(lease, key)
            body = change(None if seen.etag is None else seen.body)
            if self._put(key, bearer(lease), body, seen):
                return body
            tried = _reenter(key, tried)

    def read(self, lease: Fenced, key: str) -> Stored:
        """Return an object as it is, or raise StaleToken if somebody newer has written it. No ETag: there is none."""
        mine, seen = bearer(lease), self._get(check_resource(key))
        admit(key, mine, seen.mark)
        return seen

    def write(self, lease: Fenced, key: str, body: bytes, seen: Stored | None = None) -> bool:
        """Put an object in place of the one that was read; return False if somebody older has changed it since: read again.

        Without `seen`, whatever an older one has written is replaced.
        """
        if seen is None:
            self.update(lease, key, lambda _: body)
            return True
        if self._put(key, bearer(lease), body, seen):
            return True
        self.read(lease, key)
        return False

    def token(self, key: str) -> int | None:
        """Return the highest token that was let through, or None."""
        return token_of(self._get(check_resource(key)).mark)

    def rebase(self, key: str, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason.

        The mark goes with the object: where there is none, there is nothing to move, and any token is let in.
        """
        check_reason(check_resource(key), reason)
        to = Credentials(check_token(token), "")
        tried = 0
        while True:
            seen = self._get(key)
            if seen.etag is None:
                raise FencelockError(
                    f"there is no object {key!r} in {self._bucket!r}, and so no fence that could be moved: its first token "
                    "is let in, whichever it is",
                    key,
                )
            if self._put(key, to, seen.body, seen):
                break
            tried = _reenter(key, tried)
        tell_moved(key, token_of(seen.mark), token, reason)

    def _get(self, key: str) -> Stored:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if _code(error) not in ("NoSuchKey", "404"):
                raise
            return Stored(b"", None, None, {})
        metadata = dict(answer.get("Metadata") or {})
        token, _, id_ = metadata.pop(METADATA, "").partition(" ")
        put = metadata.pop(PUT_ID, "")
        more = {"Metadata": metadata}
        more |= {name: answer[name] for name in ("ContentType", "CacheControl", "ContentEncoding") if answer.get(name)}
        mark = Mark(int(token), unquote(id_)) if token else None
        return Stored(answer["Body"].read(), answer["ETag"], mark, more, put)

    def _put(self, key: str, mine: Credentials, body: bytes, seen: Stored) -> bool:
        self._probe(key)
        mark, put = f"{mine.token} {quote(mine.id, safe='')}", os.urandom(8).hex()
        condition = {"IfNoneMatch": "*"} if seen.etag is None else {"IfMatch": seen.etag}
        metadata = {**seen.more.get("Metadata", {}), METADATA: mark, PUT_ID: put}
        stamped = body if self._stamp is None else self._stamp(body, mark)
        options = {**seen.more, "Metadata": metadata, "Body": stamped, **condition}
        if not self._try(key, options):
            return self._get(key).put == put
        if "IfNoneMatch" in condition and "IfNoneMatch" not in self._obeyed:
            if self._try(key, options):
                raise self._ignores("If-None-Match", key)
            self._obeyed.add("IfNoneMatch")
        return True

    def _probe(self, key: str) -> None:
        """Raise GuaranteeUnavailable if the store puts an object although the condition is not met."""
        if "IfMatch" in self._obeyed:
            return
        place = key.encode()[: 1000 - len(PROBE)].decode(errors="ignore") + PROBE
        try:
            ignored = self._try(place, {"Body": b"", "IfMatch": '"fencelock"'})
        except Exception as error:
            error.add_note(
                f"fencelock tried at {place!r} whether the store obeys conditions; probe=False leaves that out"
            )
            raise
        if ignored:
            self._client.delete_object(Bucket=self._bucket, Key=place)
            raise self._ignores("If-Match", key)
        self._obeyed.add("IfMatch")

    def _try(self, key: str, options: dict[str, Any]) -> bool:
        """Put, and return whether the condition was met."""
        try:
            self._client.put_object(Bucket=self._bucket, Key=key, **options)
        except Exception as error:
            if _code(error) not in CONFLICTS:
                raise
            return False
        return True

    def _ignores(self, header: str, key: str) -> GuaranteeUnavailable:
        return GuaranteeUnavailable(
            f"the store of bucket {self._bucket!r} ignores {header}: a stale holder's write would go through. Use a store "
            "that obeys it, or keep what must be fenced elsewhere",
            key,
        )


def _reenter(key: str, tried: int) -> int:
    """Pause before another attempt, and return how many there were; raise VersionConflict after the last."""
    if tried + 1 == ATTEMPTS:
        raise VersionConflict(
            f"{key!r} was changed by others, or the store said so, each of the {ATTEMPTS} times that it was tried: try "
            "again later",
            key,
        )
    time.sleep(min(0.01 * 2**tried, LONGEST_PAUSE) * random.random())
    return tried + 1


def _code(error: Exception) -> str | None:
    """Return what the store calls an error, as botocore's ClientError has it."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None
