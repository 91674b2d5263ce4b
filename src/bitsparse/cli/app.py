"""The command's parts, and how its errors are shown.

A sub-command is a module with a function of its name, listed in ``COMMANDS``.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

import bitsparse
from bitsparse.cli.bench import bench
from bitsparse.cli.compare import compare
from bitsparse.cli.doctor import doctor
from bitsparse.cli.plan import plan
from bitsparse.cli.profile import profile
from bitsparse.cli.report import report
from bitsparse.cli.train import train
from bitsparse.training.errors import UserError, is_out_of_memory

COMMANDS = (compare, train, profile, report, plan, doctor)

app = typer.Typer(
    help="Train ReLU feed-forward networks with losslessly compressed activations.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"bitsparse {bitsparse.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def run() -> int:
    """Run the command. Returns its exit status; a foreseen error is one line on stderr."""
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if status == _INTERRUPTED:  # what some versions of Typer make of Ctrl-C
            return _fail("interrupted", status)
        return status if isinstance(status, int) else 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except UserError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of our output is gone; keep Python from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _fail("no space left on the disk")
    except Exception as error:
        # Errors of the command line. Their class is Click's, or that of a copy inside of Typer.
        if hasattr(error, "format_message"):
            return _fail(error.format_message(), 2)
        if not is_out_of_memory(error):
            raise
        return _fail("out of memory: smaller shapes, batches or models may fit")


_INTERRUPTED = 130


def _fail(message: str, status: int = 1) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return status
