"""A child process that a test talks to line by line, stops, resumes and kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Child:
    """A Python program in another process. Leaving the block kills it.

    The fork server of the contract suite (`tests/contract/fork_server.py`) starts faster, but only runs its workers.
    """

    def __init__(self, *arguments: str, **options: Any) -> None:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "bufsize": 1,
            "cwd": ROOT,
        }
        self.process: subprocess.Popen[str] = subprocess.Popen([sys.executable, *arguments], **(pipes | options))

    @classmethod
    def of_source(cls, source: str, *arguments: str, **options: Any) -> Child:
        """Start a program given by its source."""
        return cls("-c", source, *arguments, **options)

    @classmethod
    def of_module(cls, name: str, *arguments: str, **options: Any) -> Child:
        """Start a module of the tests."""
        return cls("-m", name, *arguments, **options)

    def read_line(self) -> str:
        """Return the next line that it prints. Fail if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return line.strip()

    def read_json(self) -> Any:
        """Return the next line that it prints, parsed."""
        return json.loads(self.read_line())

    def send_line(self, line: str = "") -> None:
        """Send it a line of input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def request(self, line: str) -> str:
        """Send it a line and return the line that it prints then."""
        self.send_line(line)
        return self.read_line()

    def stop(self) -> None:
        """Stop it with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue after `stop`."""
        self.process.send_signal(signal.SIGCONT)

    def ends(self, timeout: float = 60) -> tuple[int, str]:
        """Close its input and wait for its end; return its exit status and the rest of its output."""
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out

    def kill(self) -> None:
        """Kill it, stopped or not, and wait until it is gone."""
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # input that it has not read

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
