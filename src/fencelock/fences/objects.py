"""The object-store fence: a put that names the version it was made from, as S3 and its like take it (`If-Match`).

The mark is kept with the object, in its metadata. What is written is bound to what was read, by its ETag: so nothing is
entered beforehand. If somebody older has written between read and put, the change is made anew from what that left; if
somebody newer, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fencelock.fences import Fenced
from fencelock.fences.core import (
    Credentials,
    Mark,
    bearer,
    check_reason,
    check_resource,
    check_token,
    refusal,
    tell_moved,
)

METADATA = "fencelock"


class Stored(NamedTuple):
    """An object as it was read; no ETag if there is none."""

    body: bytes
    etag: str | None
    mark: Mark | None
    more: dict[str, Any]


class ObjectFence:
    """Changes objects of a bucket, and refuses whoever comes with an older token than somebody before.

    `client` is a boto3 S3 client, or whatever else has its `get_object` and `put_object` and obeys `IfMatch` and
    `IfNoneMatch`.

    S3's ETag is the digest of the content: after a newer holder has put back exactly what an older one had read, the older
    one's put goes through. Nothing is lost by it, as it was made from what is there; but if that must not be, have the mark
    made part of the content: `stamp(body, mark)` returns the body to be stored.

    >>> def sell(client: S3Client, lease: fencelock.Lease) -> None:
    ...     fence = ObjectFence(client, "shop")
    ...     fence.update("apples", lease, lambda body: str(int(body) - 5).encode())
    """

    def __init__(self, client: Any, bucket: str, *, stamp: Callable[[bytes, str], bytes] | None = None) -> None:
        self._client = client
        self._bucket = bucket
        self._stamp = stamp

    def update(self, key: str, lease: Fenced, change: Callable[[bytes | None], bytes]) -> bytes:
        """Read an object, have it changed, and put it back; return what was put, or raise StaleToken.

        `change` takes the content, or None if there is none, and may be called more than once.
        """
        while True:
            seen = self.read(key, lease)
            body = change(None if seen.etag is None else seen.body)
            if self._put(key, bearer(lease), body, seen):
                return body

    def read(self, key: str, lease: Fenced) -> Stored:
        """Return an object as it is, or raise StaleToken if somebody newer has written it."""
        seen, mine = self._get(check_resource(key)), bearer(lease)
        if seen.mark is not None and not seen.mark.admits(mine):
            raise refusal(key, mine, seen.mark)
        return seen

    def write(self, key: str, lease: Fenced, body: bytes, seen: Stored | None = None) -> bool:
        """Put an object in place of the one that was read; return False if somebody older has changed it since: read again.

        Without `seen`, whatever an older one has written is replaced.
        """
        if seen is None:
            self.update(key, lease, lambda _: body)
            return True
        if self._put(key, bearer(lease), body, seen):
            return True
        self.read(key, lease)
        return False

    def token(self, key: str) -> int | None:
        """Return the highest token that was let through, or None."""
        mark = self._get(check_resource(key)).mark
        return None if mark is None else mark.token

    def rebase(self, key: str, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        check_reason(check_resource(key), reason)
        to = Credentials(check_token(token), "")
        while True:
            seen = self._get(key)
            if self._put(key, to, seen.body, seen):
                break
        tell_moved(key, None if seen.mark is None else seen.mark.token, token, reason)

    def _get(self, key: str) -> Stored:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if _code(error) not in ("NoSuchKey", "404"):
                raise
            return Stored(b"", None, None, {})
        metadata = dict(answer.get("Metadata") or {})
        token, _, id_ = metadata.pop(METADATA, "").partition(" ")
        more = {"Metadata": metadata}
        more |= {name: answer[name] for name in ("ContentType", "CacheControl", "ContentEncoding") if answer.get(name)}
        mark = Mark(int(token), unquote(id_)) if token else None
        return Stored(answer["Body"].read(), answer["ETag"], mark, more)

    def _put(self, key: str, mine: Credentials, body: bytes, seen: Stored) -> bool:
        mark = f"{mine.token} {quote(mine.id, safe='')}"
        condition = {"IfNoneMatch": "*"} if seen.etag is None else {"IfMatch": seen.etag}
        metadata = {**seen.more.get("Metadata", {}), METADATA: mark}
        options = {**seen.more, "Metadata": metadata, **condition}
        stamped = body if self._stamp is None else self._stamp(body, mark)
        try:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=stamped, **options)
        except Exception as error:
            # 409: somebody else's conditional put was under way; 404: the object was deleted meanwhile.
            if _code(error) not in (
                "PreconditionFailed",
                "412",
                "ConditionalRequestConflict",
                "409",
                "NoSuchKey",
                "404",
            ):
                raise
            return False
        return True


def _code(error: Exception) -> str | None:
    """Return what the store calls an error, as botocore's ClientError has it."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None
