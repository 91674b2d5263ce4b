"""What the benchmark commands share."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from bitsparse.activations import ACTIVATIONS
from bitsparse.bench.result import Progress
from bitsparse.bench.timing import Spread
from bitsparse.training.errors import UserError
from bitsparse.training.files import write_atomically

JsonOption = Annotated[
    Path | None,
    typer.Option("--output-json", "--json", help="Write all results into this file."),
]
PlotOption = Annotated[Path | None, typer.Option(help="Draw a chart, as a PNG file.")]
ActivationsOption = Annotated[
    str, typer.Option(help=f"Out of: {', '.join(ACTIVATIONS)}; separated by commas.")
]
ChunkOption = Annotated[
    int | None,
    typer.Option(help='Of "chunked". (default: a quarter of the tokens, as a multiple of 64)'),
]

TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        help="Seconds for everything: a part that would not end by then, if it took as long as the "
        "longest before, is left out and reported. (default: no limit)"
    ),
]

MIB = 2**20


class BadOption(typer.BadParameter):
    """A value that is not allowed, told as a malformed option is: exit status 2."""

    def format_message(self) -> str:
        return self.message


@contextmanager
def checking_options() -> Iterator[None]:
    """Turn a UserError about a value into a :class:`BadOption`."""
    try:
        yield
    except UserError as error:
        raise BadOption(str(error)) from error


Number = TypeVar("Number", int, float)


def _list(name: str, text: str, kind: Callable[[str], Number], allowed: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"{name}: got {text!r}, allowed: {allowed}, separated by commas") from None


def densities(name: str, text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1, separated by commas."""
    return _list(name, text, float, "numbers from 0 to 1")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers of any size, separated by commas."""
    return _list(name, text, float, "numbers")


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return _list(name, text, int, "whole numbers")


def words(text: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def shape(name: str, text: str) -> tuple[int, int]:
    """``ROWSxCOLS``."""
    found = re.fullmatch(r"(\d{1,12})[x×](\d{1,12})", text.strip())
    if found is None:
        raise UserError(f"{name}: got {text!r}, allowed: ROWSxCOLS, for example 2048x4096")
    return int(found[1]), int(found[2])


def ffn_shapes(name: str, text: str) -> tuple[tuple[int, int, int], ...]:
    """``TOKENSxD_MODELxD_FF``, separated by commas."""
    shapes = []
    for part in words(text):
        found = re.fullmatch(r"(\d{1,12})[x×](\d{1,12})[x×](\d{1,12})", part)
        if found is None:
            raise UserError(
                f"{name}: got {part!r}, allowed: TOKENSxD_MODELxD_FF, for example 2048x256x1024"
            )
        shapes.append((int(found[1]), int(found[2]), int(found[3])))
    return tuple(shapes)


def by_device(device: torch.device, cpu: Any, gpu: Any) -> Any:
    """One of the two defaults."""
    return gpu if device.type == "cuda" else cpu


def check_outputs(*files: tuple[str, Path | None]) -> None:
    """Raise UserError for a file that could not be written."""
    taken: dict[Path, str] = {}
    for name, path in files:
        if path is None:
            continue
        if (path.exists() and not path.is_file()) or not path.parent.is_dir():
            raise UserError(f"{name}: got {path}, allowed: a file in a folder that is there")
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise UserError(f"{name}: got {path}, allowed: a file that can be written")
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise UserError(f"{name}: got {path}, which {other} names too; allowed: another file")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result; the file is replaced at once, so that a killed run leaves a whole one."""
    data = json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
    write_atomically(path, lambda file: file.write(data))


def writer(path: Path | None) -> Callable[[Any], None]:
    """Writes the result so far, where a file was asked for."""

    def write(result: Any) -> None:
        if path is not None:
            write_json(path, result.to_json())

    return write


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Gives what shows progress; the bar appears with the first call, so that an error
    before that is shown alone."""
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None)

    def show(progress: Progress) -> None:
        bar.start()
        bar.update(task, description=progress.what, completed=progress.done, total=progress.total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def table(title: str, caption: str | None, *columns: str) -> Table:
    """A table that fits into 80 characters, numbers in all columns but the first."""
    made = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
        min_width=60,
    )
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    return made


def show_environment(console: Console, env: dict[str, Any]) -> None:
    """Where it was measured."""
    console.print(
        f"{env['device']}, PyTorch {env['torch']}, Python {env['python']}", highlight=False
    )


def show_skipped(console: Console, skipped: list[str]) -> None:
    """What the time limit left out, if anything."""
    if skipped:
        console.print(f"time limit: not measured: {'; '.join(skipped)}", highlight=False)


def milliseconds(spread: Spread | None) -> str:
    """Median and quartiles."""
    if spread is None:
        return "–"
    return f"{spread.median * 1e3:.3f} ({spread.low * 1e3:.3f}–{spread.high * 1e3:.3f})"


def mib(nbytes: int | None) -> str:
    """In MiB."""
    return "–" if nbytes is None else f"{nbytes / MIB:,.1f}"


def ratio(value: float | None, digits: int = 3) -> str:
    """A ratio."""
    return "–" if value is None else f"{value:.{digits}f}"
