from __future__ import annotations

import re
from pathlib import Path

import pytest

from fencelock.cli import COMMANDS, codes
from tests.cli.conftest import Cli

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_documented(cli: Cli, command: str) -> None:
    """docs/cli.md has the --help output of every command, word for word."""
    help = cli(*command.split(), "--help").stdout
    assert f"```console\n$ fencelock {command + ' ' if command else ''}--help\n{help}```\n" in DOCS.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_example_comes_first(cli: Cli, command: str) -> None:
    """Each section of docs/cli.md, and each help text after its usage, begins with an example of the command."""
    section = DOCS.read_text().partition(f"\n## fencelock {command}\n\n")[2]
    assert re.match(rf"```sh\n.*fencelock {command}\b", section)
    assert cli(command, "--help").stdout.splitlines()[2].startswith(f"example: fencelock {command}")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal(cli: Cli, command: str) -> None:
    """Help is at most 80 columns wide, and no wider where there is more room."""
    help = cli(*command.split(), "--help").stdout
    assert max(map(len, help.splitlines())) <= 80
    cli.env["COLUMNS"] = "200"
    assert cli(*command.split(), "--help").stdout == help


def test_exit_codes_are_documented() -> None:
    """docs/cli.md has every exit code, with the number that the code has."""
    documented = set(map(int, re.findall(r"^\| (\d+) +\|", DOCS.read_text(), re.MULTILINE)))
    ours = {value for name, value in vars(codes).items() if isinstance(value, int) and name != "SIGNALLED"}
    assert documented == ours


def test_json_keys_are_documented() -> None:
    """docs/cli.md names every key of the JSON output."""
    text = DOCS.read_text()
    for key in (
        "engine",
        "locks",
        "name",
        "token",
        "holders",
        "waiters",
        "owner",
        "expires_in",
        "held_for",
        "mode",
        "limit",
        "value",
        "position",
        "limits",
        "time",
        "dropped",
        "reason",
        "jobs",
        "schedule",
        "next",
        "last",
        "slot",
        "outcome",
        "attempt",
        "started",
        "ended",
        "duration",
        "error",
        "triggered",
    ):
        assert f"`{key}`" in text
