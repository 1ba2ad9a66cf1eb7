"""A network path whose connections can go dead without a word: a firewall that forgot them, or an address that moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tests.servers.server import Server


class Forwarder:
    """Forwards to a server, in the event loop of the test."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._epoch = 0
        self.swallows = False
        """Whether connections are accepted from now on and nothing passes on them, for ever."""
        self.swallows_reply_to: Callable[[bytes], bool] | None = None
        """Selects a request, by the bytes that a client sends: from then on nothing comes back on its connection."""
        self.accepted = 0
        self.address = ""
        self._open: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        """The server's URL, by way of here."""
        return self._server.url_at(self.address)

    def freeze(self) -> None:
        """Let nothing more pass on any present connection, in either direction, for ever."""
        self._epoch += 1

    def lead_to(self, server: Server) -> None:
        """Have new connections go to another server; present ones stay where they are."""
        self._server = server

    def hang_up(self) -> None:
        """Close all present connections, in both directions."""
        for writer in self._open:
            writer.close()
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.swallows:
            self._open.append(writer)
            return
        there_reader, there_writer = await asyncio.open_connection(self._server.host, self._server.port)
        self._open += [writer, there_writer]
        epoch = self._epoch
        mute = asyncio.Event()

        def sent(data: bytes) -> bool:
            if self.swallows_reply_to is not None and self.swallows_reply_to(data):
                mute.set()
            return self._epoch == epoch

        def replied(_: bytes) -> bool:
            return self._epoch == epoch and not mute.is_set()

        await asyncio.gather(self._pump(reader, there_writer, sent), self._pump(there_reader, writer, replied))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passes: Callable[[bytes], bool]
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if passes(data):
                    sink.write(data)
            if passes(b""):
                sink.close()


@asynccontextmanager
async def forwarding(server: Server) -> AsyncIterator[Forwarder]:
    """Forward to a server for as long as the body runs."""
    forwarder = Forwarder(server)
    listener = await asyncio.start_server(forwarder._serve, "127.0.0.1", 0)
    forwarder.address = "{}:{}".format(*listener.sockets[0].getsockname())
    try:
        yield forwarder
    finally:
        listener.close()
        forwarder.hang_up()
        await listener.wait_closed()
        await asyncio.sleep(0.01)
