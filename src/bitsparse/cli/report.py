"""``bitsparse report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitsparse.profiling.report import save_html, save_pngs
from bitsparse.profiling.results import Profile, load
from bitsparse.training.errors import UserError, os_error
from bitsparse.training.files import make_output_dir


def report(
    file: Annotated[Path, typer.Argument(help="What bitsparse profile has written.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page. (default: FILE with the ending .html)"),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="A folder, for the charts as PNG files too.")
    ] = None,
) -> None:
    """Make one HTML page of a profile: charts to be zoomed, no network needed."""
    profile = _load(file)
    target = file.with_suffix(".html") if output is None else output
    if target.resolve() == file.resolve():
        raise UserError(f"--output: got {target}, which is the profile; allowed: another file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_html(profile, target, f"bitsparse profile: {file.name}")
    except ImportError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise os_error(target, error) from error
    print(f"written to {target} ({target.stat().st_size / 1e6:.1f} MB)")
    if png is not None:
        make_output_dir(png)
        print(f"written to {png}: {', '.join(p.name for p in save_pngs(profile, png))}")


def _load(file: Path) -> Profile:
    try:
        return load(file)
    except ValueError as error:
        raise UserError(str(error).replace("path:", "FILE:", 1)) from None
    except OSError as error:
        raise os_error(file, error) from error
