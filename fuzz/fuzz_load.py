"""Damages files that are valid, loads them, and decodes what is accepted.

    python fuzz/fuzz_load.py --seconds 600 --seed 0     # random changes, every backend
    python fuzz/fuzz_load.py --replay fuzz/findings/finding-0.safetensors
    python fuzz/fuzz_load.py --atheris -max_total_time=600 corpus/

An input passes if :func:`bitsparse.load` raises a ValueError that names the file, or if what it
returns can be decoded, to the same bits by every backend, with as many nonzeros as the file says,
and can be saved and loaded again. Everything else is a finding: another exception, a crash, a hang,
more than 2 GiB of memory (the files are small), an access outside an array (the CPU kernels are
compiled with bounds checks). The input is kept in ``--findings`` and the exit status is 1.

The third form needs ``pip install 'bitsparse[fuzz]'``. It lets coverage guide the same changes, on
the reference backend, and passes its further arguments to libFuzzer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ["NUMBA_BOUNDSCHECK"] = "1"  # read when Numba is imported
os.environ.setdefault("NUMBA_OPT", "1")  # half the time to compile

if "--atheris" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["bitsparse"]):
        import bitsparse.io
        from bitsparse import codings

        for _name in codings.SUPPORTS:
            codings.support_coding(_name)
        for _name in codings.VALUES:
            codings.value_coding(_name)

import torch

import bitsparse
from bitsparse import codings, dtypes
from bitsparse.backends import force_backend
from bitsparse.layout import TABLE_WORDS

BACKENDS = ("reference", "cpu")
DECODED_ELEMENTS = 1 << 20
"""Tensors of more are not decoded: an empty one may claim any size."""

FINDINGS = Path(__file__).resolve().parent / "findings"

HEADROOM = 2 << 30
"""Address space beyond what is in use after the imports; code is compiled into it, too."""

HANG = 60
"""Seconds after which one execution is called a hang (compiling a kernel takes some)."""

# ------------------------------------------------------------------------- valid files


class Entry(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


Content = tuple[dict[str, str], dict[str, Entry]]  # strings, entries
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F4": 1,
    "F6_E2M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
SHAPES = (
    (), (0,), (1,), (40,), (4095,), (4097,), (64, 3), (60, 70), (300, 7), (260, 40), (70, 130),
    (3, 5, 7), (2, 0, 3), (2, 3, 64, 9), (1, 1, 1, 1), (9000,),
)  # fmt: skip
SEEDS = 400


@lru_cache(maxsize=SEEDS)
def valid_file(number: int) -> bytes:
    """One of ``SEEDS`` valid files: one to three tensors, compressed ones mostly."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    tensors: dict[str, Any] = {}
    for name in ("a", "b.c", "é")[: rng.choice((1, 1, 1, 2, 3))]:
        dtype, shape = rng.choice(dtypes.SUPPORTED_DTYPES), rng.choice(SHAPES)
        x = torch.randn(shape, generator=generator)
        x *= torch.exp2(torch.randint(-rng.choice((1, 9, 30)), 3, shape, generator=generator))
        x = x if rng.random() < 0.5 else x.abs()
        kept = torch.rand(shape, generator=generator) < rng.choice((0.0, 0.02, 0.3, 1.0))
        x = torch.where(kept, x, 0).to(dtype)
        if rng.random() < 0.1:
            tensors[name] = x
            continue
        support = rng.choice(("auto", "flat", "bucketed", "bucketed", "full"))
        values = rng.choice(("auto", "exponent", *codings.VALUES))
        try:
            tensors[name] = bitsparse.compress(x, support, values)
        except ValueError:  # a coding that cannot hold it
            tensors[name] = bitsparse.compress(x, codec=rng.choice(("small", "fast")))
    with tempfile.NamedTemporaryFile() as file:
        bitsparse.save(file.name, tensors, {"key": "text"} if rng.random() < 0.2 else None)
        return Path(file.name).read_bytes()


def parse(data: bytes) -> Content:
    """Strings and entries of a file; any exception if it is none."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    strings = header.pop("__metadata__", {})
    entries = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        entries[key] = Entry(entry["dtype"], entry["shape"], data[size + begin : size + end])
    return strings, entries


def build(strings: dict[str, str], entries: dict[str, Entry]) -> bytes:
    """The inverse of :func:`parse`; the header is consistent, whatever the entries are."""
    header: dict[str, Any] = {"__metadata__": strings}
    end = 0
    for key, entry in entries.items():
        begin, end = end, end + len(entry.data)
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    return with_header(json.dumps(header), b"".join(e.data for e in entries.values()))


def with_header(header: str, data: bytes) -> bytes:
    encoded = header.encode(errors="replace")
    return len(encoded).to_bytes(8, "little") + encoded + data


# ------------------------------------------------------------------------------ changes


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes anywhere."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        at = at if rng.random() < 0.7 else min(at, rng.randrange(200))
        kind, size = rng.randrange(6), rng.choice((1, 1, 2, 4, 40))
        if kind == 0:
            del changed[at : at + size]
        elif kind == 1:
            changed[at:at] = rng.randbytes(size)
        elif kind == 2:
            changed[at:at] = changed[at : at + size]
        elif kind == 3:
            del changed[at:]
        elif at < len(changed):
            changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(changed)


TOKENS = (
    "{", "}", "[", "]", ",", ":", '"', "\\", "0", "1", "-1", "9" * 30, "1e400", "NaN", "null",
    "true", "\\u0000", "\\ud800", "[" * 3000, '{"a":' * 3000, "0.5", '"F64"', '"U8"', " ",
    "18446744073709551616", "9223372036854775807", "1152921504606846976", "4096",
)  # fmt: skip


def change_text(rng: random.Random, text: str) -> str:
    """Tokens of JSON anywhere, or a piece twice."""
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.choice((0, 0, 1, 1, 3, 20)))
    new = rng.choice(TOKENS) if rng.random() < 0.8 else text[at : at + rng.randrange(60)] * 2
    return text[:at] + new + text[end:]


def change_header(rng: random.Random, data: bytes) -> bytes:
    size = 8 + int.from_bytes(data[:8], "little")
    text = change_text(rng, data[8:size].decode(errors="replace"))
    return with_header(text, data[size:])


def change_index_text(rng: random.Random, data: bytes) -> bytes:
    strings, entries = parse(data)
    return build({**strings, "bitsparse": change_text(rng, strings["bitsparse"])}, entries)


def odd_value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, list) and old and rng.random() < 0.8:
        new, at = list(old), rng.randrange(len(old))
        kind = rng.randrange(6)
        if kind == 0:
            rng.shuffle(new)
        elif kind == 1:
            new.insert(at, 1)
        elif kind == 2:
            new = [math.prod(new)]
        elif kind == 3:
            del new[at]
        else:
            new[at] = odd_value(rng, new[at])
        return new
    if isinstance(old, int) and rng.random() < 0.6:
        return max(old + rng.choice((-1, 1, 64, -64, 4096, old, 1 << 32, 1 << 60)), 0)
    odd = (
        0, 1, -1, True, None, 1.5, "", "a" * 200, [], {}, [0], [1 << 40, 0], [1 << 61],
        1 << 63, 1 << 64, 10**30, float("nan"), [[[]]], [1] * 65, [True], ["1"],
    )  # fmt: skip
    return rng.choice(odd)


NAMES = (
    *codings.SUPPORTS, *codings.VALUES, "empty", "dense", "auto", "exponent",
    *(str(d).removeprefix("torch.") for d in dtypes.SUPPORTED_DTYPES), "float64", "int32",
)  # fmt: skip


def change_index(rng: random.Random, data: bytes) -> bytes:
    """Fields of the index, which stays JSON (with NaN)."""
    strings, entries = parse(data)
    index = json.loads(strings["bitsparse"])
    tensors = index["tensors"]
    for _ in range(rng.choice((1, 1, 2))):
        target = rng.choice([index, tensors, *tensors.values(), *tensors.values()])
        keys = sorted(target)
        key = rng.choice(keys) if keys else "a"
        kind = rng.randrange(10)
        if kind == 0:
            target.pop(key, None)
        elif kind == 1:
            target[rng.choice(("x", "", "version", "__metadata__", "a.bitsparse.b"))] = 1
        elif kind == 2 and len(tensors) > 1:
            one, other = rng.sample(sorted(tensors), 2)
            tensors[one], tensors[other] = tensors[other], tensors[one]
        elif isinstance(target.get(key), str) and rng.random() < 0.9:
            target[key] = rng.choice(NAMES)
        else:
            target[key] = odd_value(rng, target.get(key))
    return build({**strings, "bitsparse": json.dumps(index)}, entries)


def change_entries(rng: random.Random, data: bytes) -> bytes:
    """Entries dropped, renamed, retyped, reshaped, resized or exchanged."""
    strings, entries = parse(data)
    if not entries:
        return change_bytes(rng, data)
    key = rng.choice(sorted(entries))
    entry, other = entries[key], rng.choice(sorted(entries))
    kind = rng.randrange(6)
    if kind == 0:
        del entries[key]
    elif kind == 1:
        suffix = rng.choice(("", ".bitsparse.", ".bitsparse.mask", "x", ".bitsparse.values"))
        entries[rng.choice((key, other, "a", "")) + suffix] = entries.pop(key)
    elif kind == 2:
        entries[key], entries[other] = entries[other], entry
    elif kind == 3:
        code = rng.choice(sorted(SIZES))
        shape = [len(entry.data) // SIZES[code]]
        entries[key] = Entry(code, shape, entry.data[: shape[0] * SIZES[code]])
    elif kind == 4:
        count = len(entry.data) // SIZES[entry.dtype]
        shapes = ([count, 1], [1, count], [1] * 70 + [count], [], [0, 1 << 62], [count + 1])
        entries[key] = entry._replace(shape=rng.choice(shapes))
    else:
        size = SIZES[entry.dtype]
        count = max(len(entry.data) // size + rng.choice((-1, 1, 1, -10, 10, 40)), 0)
        longer = entry.data + rng.choice((bytes(40 * size), entry.data[-size:] * 40))
        entries[key] = Entry(entry.dtype, [count], longer[: count * size])
    return build(strings, entries)


def change_values(rng: random.Random, data: bytes) -> bytes:
    """Elements of one buffer: bits, numbers, positions that stay as many as they are."""
    strings, entries = parse(data)
    keys = [k for k, e in sorted(entries.items()) if e.data]
    if not keys:
        return change_bytes(rng, data)
    key = rng.choice(keys)
    entry = entries[key]
    size, changed = SIZES[entry.dtype], bytearray(entry.data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) // size) * size
        old = int.from_bytes(changed[at : at + size], "little")
        kind = rng.randrange(7)
        if kind == 0:
            new = old ^ 1 << rng.randrange(8 * size)
        elif kind == 1:
            new = old + rng.choice((-1, 1, 16, -16, 1 << 16, -(1 << 16)))
        elif kind == 2:
            new = rng.choice((0, (1 << 8 * size) - 1, 1 << 8 * size - 1, rng.getrandbits(8 * size)))
        elif kind == 3:  # the same number of bits, in other places
            bits = [old >> i & 1 for i in range(8 * size)]
            rng.shuffle(bits)
            new = sum(bit << i for i, bit in enumerate(bits))
        else:  # exchange with a near one: often the same tile
            to = min(max(at // size + rng.randrange(-8, 9), 0), len(changed) // size - 1) * size
            new = int.from_bytes(changed[to : to + size], "little")
            changed[to : to + size] = changed[at : at + size]
        changed[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    entries[key] = entry._replace(data=bytes(changed))
    return build(strings, entries)


def change_tables(rng: random.Random, data: bytes) -> bytes:
    """An offset table that is well formed, but of other counts."""
    strings, entries = parse(data)
    keys = [k for k, e in sorted(entries.items()) if "offsets" in k and e.dtype == "I32" and e.data]
    if not keys:
        return change_values(rng, data)
    key = rng.choice(keys)
    table = [int.from_bytes(entries[key].data[i : i + 4], "little") for i in
             range(0, len(entries[key].data), 4)]  # fmt: skip
    starts = []
    for block in range(0, len(table) // TABLE_WORDS * TABLE_WORDS, TABLE_WORDS):
        base = table[block] | table[block + 1] << 32
        for pair in table[block + 2 : block + TABLE_WORDS]:
            starts += [base + (pair & 0xFFFF), base + (pair >> 16)]
    at, by = rng.randrange(len(starts)), rng.choice((-1, 1, 7, 4096, -4096, 1 << 31, 1 << 40))
    last = len(starts) if rng.random() < 0.5 else rng.randrange(at, len(starts)) + 1
    starts[at:last] = [max(s + by, 0) for s in starts[at:last]]
    words = []
    for block in range(0, len(starts), 16):
        base = starts[block]
        steps = [(s - base) & 0xFFFF for s in starts[block : block + 16]]
        words += [base & 0xFFFFFFFF, base >> 32 & 0xFFFFFFFF]
        words += [low | high << 16 for low, high in zip(steps[::2], steps[1::2], strict=True)]
    new = b"".join(w.to_bytes(4, "little") for w in words)
    return build(strings, {**entries, key: entries[key]._replace(data=new)})


CHANGES: tuple[tuple[Callable[[random.Random, bytes], bytes], int], ...] = (
    (change_bytes, 2),
    (change_header, 1),
    (change_index_text, 1),
    (change_index, 3),
    (change_entries, 3),
    (change_values, 9),
    (change_tables, 1),
)


def change(rng: random.Random, data: bytes) -> bytes:
    """One change, rarely several."""
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        (how,) = rng.choices([c for c, _ in CHANGES], [w for _, w in CHANGES])
        try:
            data = how(rng, data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError):
            data = change_bytes(rng, data)  # no longer a file that can be taken apart
    return data


# ----------------------------------------------------------------------------- executions


def check(path: Path, backends: tuple[str, ...], counts: Counter[str]) -> None:
    """One execution; an exception is a finding."""
    counts["executions"] += 1
    try:
        loaded = bitsparse.load(path)
    except ValueError as error:
        assert str(path) in str(error), "the message does not name the file"
        counts["rejected"] += 1
        return
    counts["accepted"] += 1
    patterns = {name: decode(tensor, backends, counts) for name, tensor in loaded.items()}
    if counts["accepted"] % 8 == 0:
        again = path.with_suffix(".again")
        # Without an index other programs' names and dtypes are read, too.
        kept = {n: t for n, t in loaded.items() if ".bitsparse." not in n and savable(t.dtype)}
        bitsparse.save(again, kept, {k: v for k, v in loaded.metadata.items() if k != "bitsparse"})
        for name, tensor in bitsparse.load(again).items():
            assert tensor.shape == loaded[name].shape, "another shape when saved again"
            found = decode(tensor, backends[:1], counts)
            assert found is None or torch.equal(found, patterns[name]), "other bits when saved"
        counts["saved again"] += 1


def savable(dtype: torch.dtype) -> bool:
    """Whether :func:`bitsparse.save` writes it; safetensors reads a few more."""
    return not dtype.is_complex and str(dtype) not in (
        "torch.float8_e8m0fnu",
        "torch.float4_e2m1fn_x2",
    )


def decode(tensor: Any, backends: tuple[str, ...], counts: Counter[str]) -> torch.Tensor | None:
    """The bytes; ``None`` for a tensor too large to be decoded."""
    if tensor.numel() > DECODED_ELEMENTS:
        counts["too large to decode"] += 1
        return None
    if not isinstance(tensor, bitsparse.BitSparseTensor):
        return tensor.contiguous().view(-1).view(torch.uint8)
    found = []
    for backend in backends:
        with force_backend(backend):
            dense = tensor.to_dense()
        counts[f"decoded by {backend}"] += 1
        assert dense.shape == tensor.shape and dense.dtype == tensor.dtype
        found.append(dtypes.to_patterns(dense))
        assert torch.equal(found[0], found[-1]), f"{backends[0]} and {backend} differ"
    assert int(torch.count_nonzero(found[0])) == tensor.nnz, "nnz is not the number of nonzeros"
    return found[0].view(torch.uint8)


class Hang(BaseException):
    """Not an Exception: nothing in between shall handle it."""


def on_alarm(*_: object) -> None:
    raise Hang(f"still running after {HANG} s")


def work(args: argparse.Namespace) -> None:
    """The loop, in a process of its own. Counts go to stdout, a line of JSON now and then."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, on_alarm)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, resource.RLIM_INFINITY))
    counts: Counter[str] = Counter()
    path = args.work / "case.safetensors"
    end = reported = time.monotonic()
    end += args.seconds
    number = 0
    with force_backend("reference"):  # compress: without compiling kernels
        while (now := time.monotonic()) < end:
            rng = random.Random(f"{args.seed} {number}")
            data = change(rng, valid_file(rng.randrange(SEEDS)))
            path.write_bytes(data)
            try:
                signal.alarm(HANG)
                check(path, tuple(args.backends), counts)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                counts["findings"] += 1
                keep(args.findings, data, traceback.format_exc())
            finally:
                signal.alarm(0)
            number += 1
            if now - reported > 1:
                reported = now
                print(json.dumps(counts), flush=True)
    print(json.dumps(counts), flush=True)


def keep(folder: Path, data: bytes, report: str) -> None:
    """Save the first hundred findings."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.safetensors")))
    if number < 100:
        path = folder / f"finding-{number}.safetensors"
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(report)
    print(f"finding {number} in {folder}:\n{report}", file=sys.stderr, flush=True)


def supervise(args: argparse.Namespace) -> int:
    """Run workers one after the other until the time is over; what kills one is a finding."""
    total: Counter[str] = Counter()
    start, seed = time.monotonic(), args.seed
    work_folder = Path(tempfile.mkdtemp(prefix="fuzz-load-"))
    command = [sys.executable, __file__, "--work", str(work_folder)]
    command += ["--findings", str(args.findings), "--backends", *args.backends]
    while (left := args.seconds - (time.monotonic() - start)) > 0:
        options = ["--seconds", str(left), "--seed", str(seed)]
        worker = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        counts: dict[str, int] = {}
        while True:
            ready, _, _ = select.select([worker.stdout], [], [], 2 * HANG)
            line = worker.stdout.readline() if ready else b""
            if not line:
                break
            counts = json.loads(line)
        worker.kill()
        status = worker.wait()
        total.update(counts)
        if ready and status == 0:
            break
        why = f"killed by signal {-status}" if ready and status < 0 else f"status {status}"
        total["findings"] += 1
        case = work_folder / "case.safetensors"
        data = case.read_bytes() if case.exists() else b""
        keep(args.findings, data, why if ready else f"no sign of life for {2 * HANG} s")
        seed += 1
    shutil.rmtree(work_folder)
    print(f"seconds: {time.monotonic() - start:.0f}, seed: {args.seed}")
    names = ["executions", "accepted", "rejected", "saved again", "too large to decode"]
    for name in [*names, *(f"decoded by {b}" for b in args.backends), "findings"]:
        print(f"{name}: {total[name]}")
    return 1 if total["findings"] else 0


def replay(args: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    for path in args.replay:
        check(path, tuple(args.backends), counts)
    print(dict(counts))
    return 0


def run_atheris(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    path = Path(tempfile.mkdtemp(prefix="fuzz-load-")) / "case.safetensors"

    def test(data: bytes) -> None:
        path.write_bytes(data)
        with force_backend("reference"):
            check(path, ("reference",), counts)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if len(data) < 16 or rng.random() < 0.05:
            with force_backend("reference"):
                data = valid_file(rng.randrange(SEEDS))
        elif rng.random() < 0.2:
            return atheris.Mutate(data, max_size)
        return change(rng, data)[:max_size]

    atheris.Setup([sys.argv[0], "-max_len=65536", *arguments], test, custom_mutator=mutate)
    atheris.Fuzz()  # ends the process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--findings", type=Path, default=FINDINGS)
    parser.add_argument("--replay", type=Path, nargs="+")
    parser.add_argument("--atheris", action="store_true", help="arguments after it: libFuzzer's")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    if "--atheris" in sys.argv:
        run_atheris(sys.argv[sys.argv.index("--atheris") + 1 :])
        return 0
    args = parser.parse_args()
    if args.replay:
        return replay(args)
    if args.work:
        work(args)
        return 0
    return supervise(args)


if __name__ == "__main__":
    sys.exit(main())
