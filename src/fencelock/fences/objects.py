"""The object-store fence: a conditional put (`If-Match`), as S3 and compatible stores have it.

The mark is in the object's metadata. A put names the ETag of the version that was read, so nothing has to be entered
beforehand. If an older holder has written in between, the change is made again from that version; if a newer one has, it
is refused.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError, GuaranteeUnavailable, VersionConflict
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.runtime.both_apis import Api, BlockingApi, in_thread

METADATA = "fencelock"
PUT_ID = "fencelock-put"
"""The metadata that identifies a put: if a reply is lost, the driver's own retry finds the condition unmet."""

ATTEMPTS = 20
MAX_PAUSE = 0.5
PROBE = ".fencelock-probe"
CONFLICTS = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"}
"""Error codes for an unmet condition. 409: another conditional put was in flight; 404: the object was deleted."""


class StoredObject(NamedTuple):
    """An object as it was read. A missing object has no ETag (None) and an empty body."""

    body: bytes
    etag: str | None
    mark: HighWaterMark | None
    options: dict[str, Any]
    put_id: str = ""


class BaseObjectFence(Api):
    """What both APIs share."""

    def __init__(
        self, client: Any, bucket: str, *, stamp: Callable[[bytes, str], bytes] | None = None, probe: bool = True
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._stamp = stamp
        self._obeyed = set[str]() if probe else {"IfMatch", "IfNoneMatch"}

    @in_thread
    def update(self, lease: Fenced, key: str, fn: Callable[[bytes | None], bytes]) -> bytes:
        """Read an object, change it with `fn`, and put it back; return the new content, or raise StaleToken.

        `fn` gets the content, or None if there is no object, and may be called several times.
        """
        return self._update(lease, key, fn)

    @in_thread
    def read(self, lease: Fenced, key: str) -> StoredObject:
        """Return an object, or raise StaleToken if a newer holder has written it. A missing object has no ETag."""
        return self._read(lease, key)

    @in_thread
    def write(self, lease: Fenced, key: str, body: bytes, seen: StoredObject | None = None) -> bool:
        """Replace the object that was read; return False if an older holder has changed it since: then read again.

        Without `seen`, it replaces whatever an older holder has written.
        """
        if seen is None:
            self._update(lease, key, lambda _: body)
            return True
        if self._put(key, core.credentials_of(lease), body, seen):
            return True
        self._read(lease, key)
        return False

    @in_thread
    def token(self, key: str) -> int | None:
        """Return the highest token that has written the object, or None."""
        return core.token_of(self._get(core.check_resource(key)).mark)

    @in_thread
    def rebase(self, key: str, token: int, *, reason: str) -> None:
        """Move the fence of an object on purpose, down or up: it accepts every token from this one on. Logs the reason.

        The mark is stored with the object: a missing object has no fence, and accepts any token.
        """
        to, why = TokenPair(core.check_token(token), ""), core.check_reason(reason)
        tried = 0
        while True:
            seen = self._get(core.check_resource(key))
            if seen.etag is None:
                raise FencelockError(
                    f"there is no object {key!r} in {self._bucket!r}, so there is no fence to move: any token is accepted",
                    key,
                )
            if self._put(key, to, seen.body, seen):
                break
            tried = _pause(key, tried)
        core.log_rebase(key, core.token_of(seen.mark), token, why)

    def _update(self, lease: Fenced, key: str, fn: Callable[[bytes | None], bytes]) -> bytes:
        tried = 0
        while True:
            seen = self._read(lease, key)
            body = fn(None if seen.etag is None else seen.body)
            if self._put(key, core.credentials_of(lease), body, seen):
                return body
            tried = _pause(key, tried)

    def _read(self, lease: Fenced, key: str) -> StoredObject:
        pair, seen = core.credentials_of(lease), self._get(core.check_resource(key))
        core.admit(key, pair, seen.mark)
        return seen

    def _get(self, key: str) -> StoredObject:
        try:
            reply = self._client.get_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if _code(error) not in ("NoSuchKey", "404"):
                raise
            return StoredObject(b"", None, None, {})
        metadata = dict(reply.get("Metadata") or {})
        token, _, id_ = metadata.pop(METADATA, "").partition(" ")
        put_id = metadata.pop(PUT_ID, "")
        options = {"Metadata": metadata}
        options |= {name: reply[name] for name in ("ContentType", "CacheControl", "ContentEncoding") if reply.get(name)}
        mark = HighWaterMark(int(token), unquote(id_)) if token else None
        return StoredObject(reply["Body"].read(), reply["ETag"], mark, options, put_id)

    def _put(self, key: str, pair: TokenPair, body: bytes, seen: StoredObject) -> bool:
        self._probe(key)
        mark, put_id = f"{pair.token} {quote(pair.id, safe='')}", os.urandom(8).hex()
        condition = {"IfNoneMatch": "*"} if seen.etag is None else {"IfMatch": seen.etag}
        metadata = {**seen.options.get("Metadata", {}), METADATA: mark, PUT_ID: put_id}
        stamped = body if self._stamp is None else self._stamp(body, mark)
        options = {**seen.options, "Metadata": metadata, "Body": stamped, **condition}
        if not self._put_if(key, options):
            return self._get(key).put_id == put_id
        if "IfNoneMatch" in condition and "IfNoneMatch" not in self._obeyed:
            if self._put_if(key, options):
                raise self._ignores("If-None-Match", key)
            self._obeyed.add("IfNoneMatch")
        return True

    def _probe(self, key: str) -> None:
        """Raise GuaranteeUnavailable if the store accepts a put whose condition is not met."""
        if "IfMatch" in self._obeyed:
            return
        probe = key.encode()[: 1000 - len(PROBE)].decode(errors="ignore") + PROBE
        try:
            ignored = self._put_if(probe, {"Body": b"", "IfMatch": '"fencelock"'})
        except Exception as error:
            error.add_note(
                f"fencelock tried at {probe!r} whether the store obeys conditions; probe=False skips this test"
            )
            raise
        if ignored:
            self._client.delete_object(Bucket=self._bucket, Key=probe)
            raise self._ignores("If-Match", key)
        self._obeyed.add("IfMatch")

    def _put_if(self, key: str, options: dict[str, Any]) -> bool:
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
            f"the store of bucket {self._bucket!r} ignores {header}, so it would accept a stale holder's write. Use a store "
            "that obeys it, or keep fenced data elsewhere",
            key,
        )


class ObjectFence(BaseObjectFence, BlockingApi):
    """Changes objects of a bucket, and refuses old tokens.

    `client` is a boto3 S3 client, or anything else with its `get_object` and `put_object` that obeys `IfMatch` and
    `IfNoneMatch`.

    S3's ETag is the digest of the content: if a newer holder has put back exactly what an older one has read, the older
    one's put succeeds. It loses nothing, as it was made from the current content. To exclude that, make the mark part of
    the content: `stamp(body, mark)` returns the body to store.

    A store that ignores conditions does not report it. Therefore the first write is preceded by a put, beside the object,
    whose condition cannot be met, and the first new object is put twice: a store that accepts either is refused
    (GuaranteeUnavailable). `probe=False` skips that, for callers that may write nowhere else and know their store.

    >>> def sell(client: S3Client, lease: fencelock.Lease) -> None:
    ...     fence = ObjectFence(client, "shop")
    ...     fence.update(lease, "apples", lambda body: str(int(body) - 5).encode())
    """


def _pause(key: str, tried: int) -> int:
    """Pause before another attempt, and return the number of attempts; raise VersionConflict after the last one."""
    if tried + 1 == ATTEMPTS:
        raise VersionConflict(f"others changed {key!r} during each of {ATTEMPTS} attempts: try again later", key)
    time.sleep(min(0.01 * 2**tried, MAX_PAUSE) * random.random())
    return tried + 1


def _code(error: Exception) -> str | None:
    """Return the store's error code, from botocore's ClientError."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None
