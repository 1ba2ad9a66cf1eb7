"""URLs of ZooKeeper ensembles."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencelock import InvalidURL
from fencelock.engines.zookeeper.url import parse


def test_url() -> None:
    """Hosts, chroot and login are parsed, and the password is not shown."""
    url = parse("zookeeper://me:p%40ss@h1:2181,h2,[::1]:99/a/b/")
    assert url.hosts == ("h1:2181", "h2:2181", "[::1]:99")
    assert (url.chroot, url.login, url.tls) == ("/a/b", "me:p@ss", False)
    assert parse("zk://h").chroot == parse("zookeeper://h/").chroot == ""
    assert "p@ss" not in repr(url)
    assert "p@ss" not in url.name


def test_tls_url(tmp_path: Path) -> None:
    """TLS has its own scheme and port, and its files must exist."""
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    url = parse(f"zookeepers://h?ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key")
    assert (url.hosts, url.tls, url.ca) == (("h:2281",), True, f"{tmp_path}/ca")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("zookeeper://", "names no host"),
        ("zookeeper:///chroot", "names no host"),
        ("zookeeper://a,,b", "lacks a host"),
        ("zookeeper://a:1,a:1", "twice"),
        ("zookeeper://a:0", "port"),
        ("zookeeper://a:port", "port"),
        ("zookeeper://a:1:2", "colons"),
        ("zookeeper://me@a", "a user and a password"),
        ("zookeeper://:pw@a", "a user and a password"),
        ("zookeeper://a/../b", "chroot"),
        ("zookeeper://a/b//c", "chroot"),
        ("zookeeper://a?nosuch=1", "an unknown option"),
        ("zookeeper://me:1234?s3cr3t@h:1", "an unknown option"),
        ("zookeeper://me:1234?s3cr3t=@h:1", "an unknown option"),
        ("zookeeper://a?ca=x", "zookeepers://"),
        ("zookeepers://a?ca=/no/such/file", "names no file"),
        ("zookeepers://a?cert=/dev/null", "names no file"),
    ],
)
def test_invalid_url_is_refused(url: str, message: str) -> None:
    """An invalid URL is refused with the reason, without its password."""
    with pytest.raises(InvalidURL) as caught:
        parse(url.replace("://", "://me:s3cr3t@") if "@" not in url and "me" not in url else url)
    assert message in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
