"""`python -m tests.servers redis postgres`: start engines by hand, print their URLs, end them on Ctrl-C.

With `--install` it only installs the programs.
"""

from __future__ import annotations

import argparse
import signal
from contextlib import ExitStack

from tests.servers import packages
from tests.servers.shared import ALIASES, KINDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description="Start real engines by hand.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KINDS)}; all when none is given")
    parser.add_argument("--install", action="store_true", help="only install the programs")
    options = parser.parse_args()
    names = [ALIASES.get(name, name) for name in options.names] or list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"no engine is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
    packages.ensure({KINDS[name].family for name in names})
    if options.install:
        return
    with ExitStack() as stack:
        for name in names:
            engine = KINDS[name].make()
            stack.callback(engine.close)
            engine.start()
            print(f"{KINDS[name].title}: {engine.url}", flush=True)
        print("running until Ctrl-C", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
