"""Which process listens on which port, by netlink: reading /proc/net/tcp is slow when tests leave thousands of sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
TCP_LISTEN = 10

HEADER = struct.Struct("=IHHII")  # length, kind, flags, sequence, process
REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, and a socket that stands for any
PORT, INODE = struct.Struct("!4xH"), struct.Struct("=68xI")  # within a reply
LISTENING = "0A"


def listeners() -> dict[int, int]:
    """Return the ports on which a process listens, by the inodes of the sockets."""
    try:
        return dict(_query(socket.AF_INET)) | dict(_query(socket.AF_INET6))
    except OSError:  # a kernel without sock_diag, or a container without the right to use it
        return dict(_read("tcp")) | dict(_read("tcp6"))


def _query(family: int) -> Iterator[tuple[int, int]]:
    body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << TCP_LISTEN)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(5.0)
        sock.send(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0) + body)
        while True:
            replies = sock.recv(1 << 16)
            while replies:
                length, kind, *_ = HEADER.unpack_from(replies)
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    raise OSError("the kernel refused the list of listening sockets")
                yield INODE.unpack_from(replies, HEADER.size)[0], PORT.unpack_from(replies, HEADER.size)[0]
                replies = replies[(length + 3) & ~3 :]


def _read(table: str) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING:
            yield int(fields[9]), int(fields[1].rpartition(":")[2], 16)
