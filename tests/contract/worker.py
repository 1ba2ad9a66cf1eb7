"""Another process, to be killed, stopped, interrupted and forked at known points.

Its arguments are the URL, the runtime's name, the options of `connect` and the TtlScale (`fork_server.py`). It reads lines
of JSON, `{"do": source, "values": {…}}`, runs the source in one namespace that has `locks` (a client, wrapped as in
`runtimes.py`) and `ttl_scale`, and replies `{"result": …}` with the variable `result`, or `{"error": kind, "message": …}`.
Everything runs in the main thread, where signals arrive.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from inspect import iscoroutine
from types import CodeType, FunctionType
from typing import Any

from tests.contract import fork_server, runtimes
from tests.contract.ttl_scale import UNSCALED, TtlScale


class WorkerFailed(Exception):
    """The source that the worker ran raised an error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Worker:
    """The test's interface to a worker process."""

    def __init__(self, process: fork_server.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, url: str, runtime_name: str, ttl_scale: TtlScale = UNSCALED, **options: Any) -> Worker:
        """Start a process; `options` are those of `connect`."""
        worker = cls(
            await fork_server.Process.start(
                url, runtime_name, json.dumps(options), json.dumps([ttl_scale.factor, ttl_scale.slack])
            )
        )
        assert await worker.do("result = 'ready'") == "ready"
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def do(self, source: str, **values: Any) -> Any:
        """Run the source in the worker, with these values as variables; return its `result`."""
        async with self._turn:
            try:
                self._process.writer.write(json.dumps({"do": source, "values": values}).encode() + b"\n")
                await self._process.writer.drain()
                line = await self._process.reader.readline()
            except ConnectionError:
                line = b""
        if not line:
            raise WorkerFailed("Ended", "the worker ended")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"], answer["message"])
        return answer["result"]

    async def acquire(self, name: str, **options: Any) -> int:
        """Let it acquire `lease`; return the token."""
        return int(
            await self.do("lease = await locks.lock(name, **options).acquire(); result = lease.token",
                          name=name, options=options)
        )  # fmt: skip

    def stop(self) -> None:
        """SIGSTOP it, as a debugger, an overloaded machine or a sleeping laptop would."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT it."""
        self._process.send_signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def ended(self, within: float = 15.0) -> int:
        """Wait for its end; return the exit status."""
        async with asyncio.timeout(within):
            return await self._process.wait()

    async def finish_input(self) -> int:
        """Close its input, so that its program ends without a release; return the exit status."""
        self._process.writer.write_eof()
        return await self.ended()

    async def kill(self) -> None:
        """Kill it if it still runs."""
        await self._process.close()


# ---------------------------------------------------------------------------- in the worker process


def forked(work: Callable[[], Any]) -> Any:
    """Run `work` in a forked child, and return its result or the type of its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            answer = work()
            if iscoroutine(answer):
                answer = run_sync(answer)
            os.write(writer, json.dumps(answer).encode())
            status = 0
        except BaseException as error:
            traceback.print_exc()
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return answer


def run_sync(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end in a child: in a new event loop, or without one if it never suspends."""
    return asyncio.run(work) if RUNTIME_NAME == "aio" else _straight(work)


def _straight(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("it suspended")


def _compiled(source: str) -> CodeType:
    code: CodeType = compile(source, "<request>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


async def _serve(read: Callable[[], Any], namespace: dict[str, Any]) -> None:
    while True:
        line = await read()
        if not line:
            return
        request = json.loads(line)
        namespace.update(request["values"])
        namespace["result"] = None
        try:
            outcome = FunctionType(_compiled(request["do"]), namespace)()
            if iscoroutine(outcome):
                await outcome
            answer = {"result": namespace["result"]}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if answer.get("error") == "CancelledError":
            return  # asyncio.run was interrupted by Ctrl-C


async def _read_here() -> str:
    while True:
        try:
            return sys.stdin.readline()
        except KeyboardInterrupt:
            continue  # the signal came too early or too late to interrupt the source


async def _aio(namespace: dict[str, Any]) -> None:
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await _serve(reader.readline, namespace)


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background jobs
    url, options, ttl_scale = sys.argv[0], json.loads(sys.argv[2]), TtlScale(*json.loads(sys.argv[3]))
    namespace = NAMESPACE
    namespace["ttl_scale"] = ttl_scale
    namespace["locks"] = runtimes.connect(RUNTIME_NAME, runtimes.direct, url, ttl_scale, **options)
    if RUNTIME_NAME == "aio":
        asyncio.run(_aio(namespace))
    else:
        _straight(_serve(_read_here, namespace))


NAMESPACE: dict[str, Any] = {
    "__builtins__": builtins,
    "forked": forked,
    "drive": run_sync,
    "asyncio": asyncio,
    "os": os,
    "sys": sys,
}
"""The variables of the sources. They live as long as the module, as the globals of a program do."""
RUNTIME_NAME = ""

if __name__ == "__main__":
    sys.argv = fork_server.serve(int(sys.argv[1]))
    RUNTIME_NAME = sys.argv[1]
    main()
