"""Where tokens come from, and which of them make up which batch."""

from __future__ import annotations

import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitsparse.training.errors import UserError, os_error

GPT2_VOCAB = 50304
"""GPT-2's 50257 tokens, rounded up to a multiple of 128; assumed for shards of uint16 tokens."""

LLAMA3_VOCAB = 128256
"""Assumed for llm.c's shards of uint32 tokens."""

_HEADER_BYTES = 256 * 4
# magic number -> (version, dtype of the tokens, vocabulary)
_FORMATS: dict[int, tuple[int, Any, int]] = {
    20240520: (1, np.uint16, GPT2_VOCAB),
    20240801: (7, np.uint32, LLAMA3_VOCAB),
}


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens in parts (files), with the last fraction held out for evaluation."""

    parts: list[np.ndarray]
    vocab_size: int
    """Tokens are smaller than this; checked as batches are made."""
    tokenizer: Any = None
    """A ``tokenizers.Tokenizer``, or None: tokens are bytes (or ids of an unknown vocabulary)."""
    is_bytes: bool = False
    source: str = ""
    """For people: what the tokens were read from."""

    @property
    def tokens(self) -> int:
        return sum(len(p) for p in self.parts)

    def split(self, eval_fraction: float) -> tuple[Split, Split]:
        """The train and the eval part of the stream."""
        cut = int(self.tokens * (1 - eval_fraction))
        return Split(self, 0, cut, 0), Split(self, cut, self.tokens, 1)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``[start, start + count)`` of the stream, int64.

        Raises:
            UserError: a token outside of the vocabulary.
        """
        ends = list(accumulate(len(p) for p in self.parts))
        index = bisect_right(ends, start)
        offset = start - (ends[index - 1] if index else 0)
        pieces = []
        while count > 0:
            piece = self.parts[index][offset : offset + count]
            pieces.append(piece)
            count -= len(piece)
            index, offset = index + 1, 0
        window = np.concatenate(pieces).astype(np.int64)
        if len(window) and (largest := int(window.max())) >= self.vocab_size:
            raise UserError(
                f"--data: got token {largest}, allowed: below the vocabulary size "
                f"{self.vocab_size} (see --vocab-size)"
            )
        return window

    def fingerprint(self) -> str:
        """Tells corpora apart, without reading all of them: length, beginning and end."""
        total = self.tokens
        edge = min(total, 65536)
        ends = (self.read(0, edge), self.read(total - edge, edge))
        checksum = zlib.crc32(b"".join(e.tobytes() for e in ends))
        return f"{total} tokens, crc32 {checksum:08x}"

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for people."""
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(list(tokens)))
        if self.is_bytes:
            return bytes(t & 0xFF for t in tokens).decode("utf-8", errors="replace")
        return " ".join(map(str, tokens))


@dataclass(frozen=True)
class Split:
    """Tokens ``[start, stop)`` of a corpus."""

    corpus: Corpus
    start: int
    stop: int
    stream: int
    """Distinguishes the random numbers of the splits."""

    def check_length(self, seq_len: int, what: str) -> None:
        """Raise UserError unless there is at least one sequence and its shifted targets."""
        if self.stop - self.start < seq_len + 1:
            raise UserError(
                f"--data: the {what} part has {self.stop - self.start} tokens, allowed: at least "
                f"--seq-len + 1 = {seq_len + 1}"
            )

    def batch(
        self,
        seed: int,
        step: int,
        micro_step: int,
        batch_size: int,
        seq_len: int,
        rows: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 ``[batch_size, seq_len]`` each, on the CPU.

        A function of its arguments, without state: that makes resuming exact. ``rows``: the part of
        the batch that is wanted.
        """
        rng = np.random.Generator(np.random.Philox([seed, self.stream, step, micro_step]))
        starts = rng.integers(self.start, self.stop - seq_len, size=batch_size)
        windows = [self.corpus.read(int(s), seq_len + 1) for s in starts[rows]]
        tokens = torch.from_numpy(np.stack(windows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_corpus(
    paths: Sequence[Path], tokenizer: Path | None = None, vocab_size: int | None = None
) -> Corpus:
    """Read text files, folders and token shards (``.bin``); nothing: Python's standard library.

    Args:
        paths: files, or folders whose files are read in sorted order.
        tokenizer: a Hugging Face ``tokenizer.json``; without it, the tokens of text are its bytes.
        vocab_size: overrides the vocabulary size of the data.

    Raises:
        UserError: data that cannot be read, is empty or not in a known format.
    """
    files = _list_files(paths) if paths else _standard_library()
    source = ", ".join(map(str, paths)) if paths else "source code of Python's standard library"
    shards = [f for f in files if f.suffix == ".bin"]
    codec = None if tokenizer is None else _load_tokenizer(tokenizer)
    if shards:
        if len(shards) != len(files):
            other = next(f for f in files if f.suffix != ".bin")
            raise UserError(
                f"--data: got token shards (.bin) together with {other}, "
                "allowed: only shards, or only text"
            )
        loaded = [_map_shard(f) for f in shards]
        parts, vocab = [p for p, _ in loaded], max(v for _, v in loaded)
        if codec is not None:
            vocab = codec.get_vocab_size()
    elif codec is not None:
        parts, vocab = [_encode(codec, f) for f in files], codec.get_vocab_size()
    else:
        text = b"".join(_read_bytes(f) for f in files)
        parts, vocab = [np.frombuffer(text, np.uint8)], 256
    parts = [p for p in parts if len(p)]
    if not parts:
        raise UserError(f"--data: {source} has no tokens, allowed: data that is not empty")
    return Corpus(parts, vocab_size or vocab, codec, not shards and codec is None, source)


def _standard_library() -> list[Path]:
    """Text that is on every machine with Python."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    if not files:
        raise UserError(f"--data: no Python source found in {root}; give a file or folder")
    return sorted(files)


def _list_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                p
                for p in path.rglob("*")
                if p.is_file()
                and not any(part.startswith(".") for part in p.relative_to(path).parts)
            )
            if not inside:
                raise UserError(f"--data: the folder {path} has no files, allowed: text or .bin")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"--data: {path} is not there, allowed: a file or a folder")
    return files


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--data: {os_error(path, error)}") from error


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            "--tokenizer: the package tokenizers is missing: pip install 'bitsparse[cli]'"
        ) from None
    if not path.is_file():
        raise UserError(f"--tokenizer: {path} is not there, allowed: a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer: {path} is not a tokenizer.json: {error}") from error


def _encode(codec: Any, path: Path) -> np.ndarray:
    try:
        text = _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data: {path} is not UTF-8 text (byte {error.start}); "
            "allowed: UTF-8 with --tokenizer, anything without"
        ) from error
    return np.asarray(codec.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def _map_shard(path: Path) -> tuple[np.ndarray, int]:
    """Map a file of tokens into memory. Returns the tokens and the vocabulary size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(_HEADER_BYTES), "<i4", count=min(size // 4, 256))
        magic = int(header[0]) if len(header) else 0
        if magic in _FORMATS:
            return _map_with_header(path, size, header)
        if _looks_like_magic(magic):
            raise UserError(
                f"--data: {path} begins with the unknown magic number {magic}, allowed: "
                f"{', '.join(map(str, _FORMATS))}, or raw uint16 tokens"
            )
        if size % 2:
            raise UserError(
                f"--data: {path} has {size} bytes, allowed: an even number (uint16 tokens)"
            )
        if size == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint16), GPT2_VOCAB
        return np.memmap(path, "<u2", mode="r"), GPT2_VOCAB
    except OSError as error:
        raise UserError(f"--data: {os_error(path, error)}") from error


def _looks_like_magic(number: int) -> bool:
    """Whether ``number`` is a date of 2024 or 2025, as the magic numbers of these formats are.

    Raw shards have no mark. Only numbers are refused that GPT-2's tokens cannot begin with: the
    lower half would be a token above 50256.
    """
    year, month, day = number // 10000, number // 100 % 100, number % 100
    is_date = year in (2024, 2025) and 1 <= month <= 12 and 1 <= day <= 31
    return is_date and number & 0xFFFF > 50256


def _map_with_header(path: Path, size: int, header: np.ndarray) -> tuple[np.ndarray, int]:
    version, dtype, vocab = _FORMATS[int(header[0])]
    if len(header) < 256:
        raise UserError(f"--data: {path} ends within its header of {_HEADER_BYTES} bytes")
    if header[1] != version:
        raise UserError(
            f"--data: {path} has version {header[1]} of format {header[0]}, allowed: {version}"
        )
    count = int(header[2])
    expected = _HEADER_BYTES + count * np.dtype(dtype).itemsize
    if count < 0 or size != expected:
        raise UserError(
            f"--data: {path} has {size} bytes, its header says {count} tokens: {expected} bytes"
        )
    if count == 0:
        return np.empty(0, dtype), vocab
    little = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path, little, mode="r", offset=_HEADER_BYTES, shape=(count,)), vocab
