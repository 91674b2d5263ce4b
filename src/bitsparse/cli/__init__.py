"""The ``bitsparse`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; ends the process.

    Typer and the rest of the ``cli`` extra are imported here, so that a plain install says what is
    missing instead of failing on an import.
    """
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(
            "the bitsparse command needs extra packages: pip install 'bitsparse[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    from bitsparse.cli.app import run

    sys.exit(run())
