"""A reader of the storage format in plain Python, written from docs/format.md alone.

Nothing of the package is used: where both give the same tensor, or both refuse, the description,
the package and this file agree. It is slow and meant for small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

DTYPES = {  # exponent bits, mantissa bits; the sign is one more
    "float32": (8, 23),
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e5m2": (5, 2),
    "float8_e5m2fnuz": (5, 2),
    "float8_e4m3fn": (4, 3),
    "float8_e4m3fnuz": (4, 3),
}
EXPONENTS = {  # bits of the field, whether there is a sign
    "exponent4": (4, False),
    "exponent3": (3, False),
    "signed_exponent4": (4, True),
    "signed_exponent3": (3, True),
}
SUPPORTS = {
    "full": set(),
    "flat": {"mask"},
    "bucketed": {"groups", "buckets", "bucket_offsets"},
}
TILE = 4096


def decode(
    shape: tuple[int, ...],
    dtype: str,
    nnz: int,
    support: str,
    values: str,
    buffers: dict[str, bytes],
) -> list[int]:
    """The patterns of all elements in row-major order.

    Raises:
        ValueError: the parts are not as the format says.
    """
    _require(dtype in DTYPES, "dtype")
    _require(all(size >= 0 for size in shape), "shape")
    numel = math.prod(shape)
    _require(0 <= nnz <= numel, "nnz")
    exponent_bits, mantissa_bits = DTYPES[dtype]
    item = (1 + exponent_bits + mantissa_bits) // 8

    if support == "empty" or values == "dense":
        _require((support, values) in (("empty", "raw"), ("full", "dense")), "support, values")
        _require(set(buffers) == {"values"}, "buffers")
        length = numel if values == "dense" else 0
        _require(len(buffers["values"]) == item * length, "values")
        stored = _items(buffers["values"], item)
        _require(sum(p != 0 for p in stored) == nnz, "nnz")
        return stored if values == "dense" else [0] * numel

    _require(support in SUPPORTS, "support")
    _require(values in ("raw", "unsigned", *EXPONENTS), "values")
    names = {"values", "offsets", *SUPPORTS[support]}
    if values in EXPONENTS:
        names |= {"exponents", "escapes", "escape_offsets"}
    _require(set(buffers) == names, "buffers")
    _require(numel > 0, "support")

    cols = shape[-1] if shape else 1
    rows = numel // cols
    blocked = cols <= 2**24 and 64 * -(-rows // 64) * 4 <= 5 * rows
    height = 64 if blocked else 1
    slots = -(-rows // height) * height * cols
    tiles = -(-slots // TILE)
    # Before anything is looped over, so that a large shape needs large buffers.
    _require(len(buffers["offsets"]) == 40 * -(-(tiles + 1) // 16), "offsets")

    if support == "full":
        _require(nnz == numel, "nnz")
        inside = (_slot(i // cols, i % cols, cols, height) for i in range(numel))
        nonzero = sorted(inside)
    elif support == "flat":
        _require(len(buffers["mask"]) == 4 * -(-slots // 32), "mask")
        nonzero = list(_set_bits(buffers["mask"]))
    else:
        nonzero = _bucketed(buffers, tiles)
    _require(len(nonzero) == nnz, "nnz")
    elements = []
    for slot in nonzero:
        _require(slot < slots, "a bit after the last slot")
        block, rest = divmod(slot, height * cols)
        row = block * height + rest % height
        _require(row < rows, "a bit of a row that is not there")
        elements.append(row * cols + rest // height)
    tile_of = [slot // TILE for slot in nonzero]
    _check_table("offsets", buffers["offsets"], _count(tile_of, tiles))

    if values == "raw":
        _require(len(buffers["values"]) == item * nnz, "values")
        patterns = _items(buffers["values"], item)
    elif values == "unsigned":
        patterns = _unpack(buffers["values"], nnz, 8 * item - 1)
    else:
        patterns = _exponents(buffers, values, exponent_bits, mantissa_bits, tile_of, tiles)
    _require(all(patterns), "a value is zero")
    dense = [0] * numel
    for element, pattern in zip(elements, patterns, strict=True):
        dense[element] = pattern
    return dense


def _bucketed(buffers: dict[str, bytes], tiles: int) -> list[int]:
    """Nonzero slots, ascending."""
    groups, stream = buffers["groups"], buffers["buckets"]
    _require(len(groups) == 8 * tiles, "groups")
    entries = _read_table("bucket_offsets", buffers["bucket_offsets"], tiles)
    _require(entries[0] == 0 and entries[-1] == len(stream), "bucket_offsets")
    _require(all(stream), "buckets: an empty one")
    nonzero, counts = [], []
    for t in range(tiles):
        first, last = entries[t], entries[t + 1]
        _require(0 <= last - first <= 576, "bucket_offsets")
        present = list(_set_bits(groups[8 * t : 8 * t + 8]))
        _require(len(present) <= last - first, "groups")
        at = first + len(present)
        for g, marked in zip(present, stream[first:last], strict=False):
            for b in range(8):
                if marked >> b & 1:
                    _require(at < last, "buckets")
                    start = t * TILE + g * 64 + b * 8
                    nonzero += [start + i for i in range(8) if stream[at] >> i & 1]
                    at += 1
        _require(at == last, "buckets")
        counts.append(last - first)
    _check_table("bucket_offsets", buffers["bucket_offsets"], counts)
    return nonzero


def _exponents(
    buffers: dict[str, bytes],
    coding: str,
    exponent_bits: int,
    mantissa_bits: int,
    tile_of: list[int],
    tiles: int,
) -> list[int]:
    field_bits, signed = EXPONENTS[coding]
    _require(field_bits < exponent_bits, "values")
    largest, escapes = buffers["exponents"], list(buffers["escapes"])
    _require(len(largest) == tiles, "exponents")
    _require(all(e < 1 << exponent_bits for e in [*largest, *escapes]), "exponents, escapes")
    codes = _unpack(buffers["values"], len(tile_of), mantissa_bits + field_bits + signed)
    all_ones = (1 << field_bits) - 1
    patterns, escaped = [], []
    for tile, code in zip(tile_of, codes, strict=True):
        mantissa = code & ((1 << mantissa_bits) - 1)
        field = code >> mantissa_bits & all_ones
        sign = code >> (mantissa_bits + field_bits)
        if field == all_ones:
            _require(len(escaped) < len(escapes), "escapes")
            exponent = escapes[len(escaped)]
            escaped.append(tile)
        else:
            exponent = largest[tile] - field
            _require(exponent >= 0, "exponents")
        patterns.append((sign << exponent_bits | exponent) << mantissa_bits | mantissa)
    _require(len(escaped) == len(escapes), "escapes")
    _check_table("escape_offsets", buffers["escape_offsets"], _count(escaped, tiles))
    return patterns


def table(counts: list[int]) -> bytes:
    """The offset table of so many entries in each tile."""
    entries = [0]
    for count in counts:
        entries.append(entries[-1] + count)
    entries += entries[-1:] * (-len(entries) % 16)
    stored = b""
    for first in range(0, len(entries), 16):
        base = entries[first]
        stored += base.to_bytes(8, "little")
        stored += b"".join((e - base).to_bytes(2, "little") for e in entries[first : first + 16])
    return stored


def _read_table(name: str, stored: bytes, tiles: int) -> list[int]:
    _require(len(stored) == 40 * -(-(tiles + 1) // 16), name)
    entries = []
    for first in range(0, len(stored), 40):
        base = int.from_bytes(stored[first : first + 8], "little")
        entries += [base + d for d in _items(stored[first + 8 : first + 40], 2)]
    return entries[: tiles + 1]


def _check_table(name: str, stored: bytes, counts: list[int]) -> None:
    _require(stored == table(counts), name)


def _slot(row: int, col: int, cols: int, height: int) -> int:
    return row // height * height * cols + col * height + row % height


def _items(stored: bytes, size: int) -> list[int]:
    return [int.from_bytes(stored[i : i + size], "little") for i in range(0, len(stored), size)]


def _unpack(stored: bytes, count: int, width: int) -> list[int]:
    """Codes of a packed stream."""
    _require(len(stored) == 4 * -(-count * width // 32), "values")
    used = count * width
    _require(int.from_bytes(stored[used // 8 :], "little") >> used % 8 == 0, "bits after the last")
    codes = []
    for i in range(0, used, width):
        near = int.from_bytes(stored[i // 8 : i // 8 + 5], "little")
        codes.append(near >> i % 8 & ((1 << width) - 1))
    return codes


def _set_bits(stored: bytes) -> Iterator[int]:
    return (8 * i + b for i, byte in enumerate(stored) if byte for b in range(8) if byte >> b & 1)


def _count(tile_of: Iterable[int], tiles: int) -> list[int]:
    counts = [0] * tiles
    for tile in tile_of:
        counts[tile] += 1
    return counts


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
