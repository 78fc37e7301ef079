"""The command line ``context-cache``.

Rule: importing this package needs nothing beyond the standard library, so that a bare installation can still say what
is missing. Everything that needs click, rich or msgspec is imported by ``main``.
"""

import os
import sys
from importlib.util import find_spec

__all__ = ["main"]

_REQUIRED = ("click", "msgspec", "rich")


def main() -> None:
    """Run the command line with the arguments of the process, and end the process.

    Exit status 0: done; 1: the thing checked does not hold; 2: arguments, a file or the installation are
    not usable, which one sentence on standard error explains.
    """
    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if missing:
        print(
            f"context-cache: the command line needs {', '.join(missing)}, which a bare installation leaves out; "
            "run: pip install 'context-cache-coordinator[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from context_cache.coordinator.cli.app import command_line

    try:
        command_line.main(prog_name="context-cache")
    except OSError as error:
        # What has a name is a file that a command reads or writes; what has none is where the result goes.
        reason = error.strerror or str(error)
        if error.filename is None:
            words = f"the output could not be written: {reason}; write it somewhere else"
        else:
            words = f"{os.fsdecode(error.filename)}: {reason}; name a file that can be used"
        print(f"context-cache: {words}", file=sys.stderr)
        # What is still buffered would fail again when the interpreter flushes it, and with a traceback.
        sys.stdout = None
        sys.exit(2)
