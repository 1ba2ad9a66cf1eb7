"""Records: what is remembered beside the locks, fenced by tokens; for the engines that keep them."""

from __future__ import annotations

import asyncio

import pytest

from fencelock.core.records import Records
from tests.contract.factory import MakeClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.records


def records_of(factory: MakeClient, namespace: str = "fencelock") -> Records:
    records: Records = factory.engine(namespace).records  # type: ignore[attr-defined]
    return records


async def test_record_is_read_as_it_was_written(factory: MakeClient) -> None:
    """What one client writes another reads, byte for byte, under any key; other namespaces do not see it."""
    mine, theirs, elsewhere = records_of(factory), records_of(factory), records_of(factory, "elsewhere")
    value = bytes(range(256))
    for key in ("x", "a/b", "..", "ünïcødé {x}:*", "k" * 1024):
        assert await mine.read(key) is None
        done, record = await mine.write(key, value, token=7, ttl=60)
        assert done
        assert record is not None
        found = await theirs.read(key)
        assert found is not None
        assert (found.value, found.token, found.version) == (value, 7, record.version)
        assert 0 < found.expires_in <= 61
        assert await elsewhere.read(key) is None
    assert (await mine.write("x", b"", token=7, ttl=60)).done
    found = await theirs.read("x")
    assert found is not None
    assert found.value == b""


async def test_write_with_a_lower_token_is_refused(factory: MakeClient) -> None:
    """A write with a lower token than the stored one is refused; the same token may write again."""
    records = records_of(factory)
    assert (await records.write("x", b"old", token=33, ttl=60)).done
    assert (await records.write("x", b"new", token=34, ttl=60)).done
    done, there = await records.write("x", b"stale", token=33, ttl=60)
    assert not done
    assert there is not None
    assert (there.value, there.token) == (b"new", 34)
    assert (await records.write("x", b"newer", token=34, ttl=60)).done
    found = await records.read("x")
    assert found is not None
    assert found.value == b"newer"


async def test_forgotten_record_still_refuses_stale_tokens(factory: MakeClient) -> None:
    """After a record was forgotten readers find none, and its token still refuses a stale writer."""
    records = records_of(factory)
    assert (await records.write("x", b"value", token=34, ttl=60)).done
    assert not (await records.write("x", None, token=33, ttl=60)).done
    assert await records.write("x", None, token=34, ttl=60) == (True, None)
    assert await records.read("x") is None
    assert await records.write("x", b"stale", token=33, ttl=60) == (False, None)
    assert (await records.write("x", b"next", token=35, ttl=60, expect=0)).done


async def test_second_write_on_one_version_is_refused(factory: MakeClient) -> None:
    """Of two writers that read the same version one is refused and gets the current entry; versions only increase."""
    records = records_of(factory)
    done, first = await records.write("x", b"1", token=1, ttl=60, expect=0)
    assert done
    assert first is not None
    assert not (await records.write("x", b"2", token=1, ttl=60, expect=0)).done
    done, second = await records.write("x", b"2", token=1, ttl=60, expect=first.version)
    assert done
    assert second is not None
    assert second.version > first.version
    done, there = await records.write("x", b"3", token=1, ttl=60, expect=first.version)
    assert not done
    assert there is not None
    assert (there.value, there.version) == (b"2", second.version)
    assert await records.write("y", b"1", token=1, ttl=60, expect=second.version) == (False, None)


async def test_record_expires(factory: MakeClient) -> None:
    """A record and its token are gone when its ttl ends; its version is never used again."""
    records = records_of(factory)
    _, first = await records.write("x", b"1", token=34, ttl=1)
    assert first is not None

    async def gone() -> bool:
        return await records.read("x") is None

    await eventually(gone, "the record runs out")
    assert not (await records.write("x", b"2", token=1, ttl=60, expect=first.version)).done
    done, second = await records.write("x", b"2", token=1, ttl=60, expect=0)
    assert done
    assert second is not None
    assert second.version > first.version


async def test_concurrent_compare_and_set_loses_no_update(factory: MakeClient) -> None:
    """Many clients that increment a number by read and expected write lose no update."""
    clients = [records_of(factory) for _ in range(4)]

    async def add(records: Records) -> None:
        for _ in range(5):
            while True:
                found = await records.read("n")
                number = 0 if found is None else int(found.value)
                version = 0 if found is None else found.version
                if (await records.write("n", b"%d" % (number + 1), token=1, ttl=60, expect=version)).done:
                    break
                await asyncio.sleep(0)

    await asyncio.gather(*map(add, clients))
    found = await clients[0].read("n")
    assert found is not None
    assert int(found.value) == 20
