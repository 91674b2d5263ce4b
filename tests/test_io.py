"""Files: what is saved comes back, and nothing that a file contains does harm."""

import errno
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitsparse
from bitsparse import codings, dtypes, io
from bitsparse.backends import force_backend
from helpers import assert_same_bits, random_sparse

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PLAIN_DTYPES = [d for d in io._SAFETENSORS_DTYPES if d not in dtypes.SUPPORTED_DTYPES]
FNUZ = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}  # older versions of safetensors lack them
SHAPES = [(), (0,), (5,), (4100,), (300, 3), (2, 0, 3), (2, 33, 7), (2, 3, 4, 9)]


@pytest.fixture(autouse=True, scope="module")
def reference():
    """Files do not depend on the backend, and this one has nothing to compile."""
    with force_backend("reference"):
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tensors.safetensors"


def same_bytes(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = (t.detach().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    assert torch.equal(a, b)


def same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        same_bytes(actual, expected)
        return
    for name in ("shape", "dtype", "nnz", "support", "values"):
        assert getattr(actual, name) == getattr(expected, name)
    assert actual.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        assert torch.equal(actual.buffers[name].cpu(), buffer.cpu())
    assert_same_bits(actual.to_dense().cpu(), expected.to_dense().cpu())


# --------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED_DTYPES, ids=str)
def test_every_coding_comes_back(path, dtype):
    tensors, seen = {}, set()
    for shape in SHAPES:
        for density, supports in ((0, ["auto"]), (0.3, ["flat", "bucketed"]), (1, ["full"])):
            x = random_sparse(shape, density, dtype, signed=density == 0.3)
            for support in supports:
                for values in ("auto", "dense", *codings.VALUES):
                    try:
                        c = bitsparse.compress(x, support, values)
                    except ValueError:  # it cannot hold these values
                        continue
                    kind = (c.support, c.values, len(shape), c.numel() == 0)
                    if kind not in seen:
                        tensors[f"{shape} {c.support} {c.values}"] = c
                        seen.add(kind)
    supports = {s for s, _, _, _ in seen}
    assert supports == {"empty", *codings.SUPPORTS}
    wanted = {v for v in codings.VALUES if codings.value_coding(v).applies(dtype, False)}
    assert {v for _, v, _, _ in seen} == {"dense", *wanted}
    bitsparse.save(path, tensors)
    loaded = bitsparse.load(path)
    assert list(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)


@pytest.mark.parametrize("dtype", [*PLAIN_DTYPES, *dtypes.SUPPORTED_DTYPES], ids=str)
def test_plain_tensors_come_back(path, dtype):
    base = (torch.arange(210).view(5, 6, 7) % 100).to(dtype)
    views = {"base": base, "t": base.transpose(0, 2), "step": base[::2, 1:, ::3], "tail": base[3:]}
    views |= {"expanded": base[:1, :1].expand(4, 2, 7), "scalar": base[1, 2, 3], "row": base[0, 0]}
    views |= {"empty": base[:0], "rank 4": base[None], "again": base, "c": base.cpu()}
    bitsparse.save(path, views)
    if dtype in FNUZ and tuple(map(int, safetensors.__version__.split(".")[:2])) < (0, 8):
        pytest.skip("safetensors reads these from 0.8 on")
    loaded = bitsparse.load(path)
    for name, view in views.items():
        same(loaded[name], view)
        assert loaded[name].is_contiguous()


def test_parameters_lazy_signs_and_overlap(path):
    x = torch.randn(4, 5)
    tensors = {"p": torch.nn.Parameter(x), "n": torch._neg_view(x), "a": x.view(-1)[:10]}
    bitsparse.save(path, tensors)
    loaded = bitsparse.load(path)
    for name, tensor in tensors.items():
        same_bytes(loaded[name], tensor)
        assert not loaded[name].requires_grad


def test_every_backend(path, backend_device):
    x = random_sparse((70, 130), 0.2, torch.bfloat16, signed=True).to(backend_device)
    with force_backend("reference"):  # less to compile
        c = bitsparse.compress(x, "flat", "raw")
    bitsparse.save(path, {"c": c, "x": x, "same": c})
    for lazy in (False, True):
        loaded = bitsparse.load(path, device=backend_device, lazy=lazy)
        assert_same_bits(loaded["c"].to_dense(), x)
        assert_same_bits(loaded["x"], x)
        assert loaded["same"].device == x.device
    loaded.close()


def test_names_metadata_and_no_tensors(path):
    x = torch.tensor([1.0, 0.0])
    names = ["", "ü.weight", "a/b c", 'quote"\\', "a\0b", "bitsparse", "x.bitsparse", "😀"]
    names.append("a" * 999)
    tensors = dict.fromkeys(names, x) | {n + "c": bitsparse.compress(x) for n in names}
    metadata = {"format": "pt", "": "", "ü": "😀\n\0", "__metadata__": "x"}
    bitsparse.save(str(path), tensors, metadata)
    loaded = bitsparse.load(str(path))
    assert list(loaded) == sorted(tensors)
    assert loaded.metadata == metadata
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
    bitsparse.save(path, {})
    assert (bitsparse.load(path), bitsparse.load(path).metadata) == ({}, {})


def test_same_tensors_same_bytes(path):
    x = random_sparse((70, 130), 0.2, torch.bfloat16)
    tensors = {"b": x, "a": bitsparse.compress(x), "c": torch.arange(3)}
    metadata = {"x": "1", "y": "2", "a": "3"}
    bitsparse.save(path, tensors, metadata)
    first = path.read_bytes()
    reverse = [dict(reversed(d.items())) for d in (tensors, metadata)]
    bitsparse.save(path, *reverse)
    assert path.read_bytes() == first
    loaded = bitsparse.load(path)
    bitsparse.save(path, loaded, loaded.metadata)
    assert path.read_bytes() == first


# --------------------------------------------------------------------- other programs' files


def test_other_readers_read_plain_tensors(path):
    x = torch.randn(3, 4)
    bitsparse.save(path, {"x": x.t(), "c": bitsparse.compress(torch.relu(x))}, {"k": "v"})
    found = load_file(path)
    same_bytes(found["x"], x.t())
    assert all(k == "x" or k.startswith("c.bitsparse.") for k in found)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["k"] == "v"
        index = json.loads(file.metadata()["bitsparse"])
    assert index["version"] == 1
    assert index["tensors"].keys() == {"c"}


def test_other_writers_files_are_read(path):
    tensors = {"a.bitsparse.mask": torch.ones(3), "b": torch.zeros(2, 0), "c": torch.tensor(True)}
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, path, metadata)
        loaded = bitsparse.load(path)
        assert loaded.keys() == tensors.keys()
        assert loaded.metadata == (metadata or {})
        for name, tensor in tensors.items():
            same(loaded[name], tensor)


# --------------------------------------------------------------------------------- lazy


def test_lazy_reads_what_is_asked_for(path):
    x = random_sparse((70, 130), 0.2, torch.bfloat16)
    c = bitsparse.compress(x, "bucketed", "exponent3")
    bitsparse.save(path, {"c": c, "damaged": c, "x": x}, {"k": "v"})
    edit(path, lambda h, d: data_of(h, d, "damaged.bitsparse.buckets").__setitem__(3, 0))
    with bitsparse.load(path, lazy=True) as file:
        assert isinstance(file, bitsparse.TensorFile)
        assert (list(file), len(file), "x" in file, "y" in file) == (["c", "damaged", "x"], 3, 1, 0)
        assert file.metadata == {"k": "v"}
        info = file.info("damaged")  # does not look at it
        assert info == bitsparse.TensorInfo(x.shape, x.dtype, c.nbytes, c.nnz, c.support, c.values)
        assert file.info("x") == bitsparse.TensorInfo(x.shape, x.dtype, 2 * x.numel())
        same(file["c"], c)
        plain = file["x"]
        assert file["x"] is not plain
        with pytest.raises(ValueError, match=r"tensors.safetensors: 'damaged': buckets"):
            file["damaged"]
        for ask in (file.__getitem__, file.info):
            with pytest.raises(KeyError, match="nothing"):
                ask("nothing")
        bitsparse.save(path, {})  # replaced, not overwritten: what is open stays
        same(file["x"], x)
    same(plain, x)
    for ask in (file.__getitem__, file.info):
        with pytest.raises(ValueError, match="closed"):
            ask("x")
    file.close()
    assert "closed" in repr(file)
    assert bitsparse.load(path) == {}


def test_damage_in_one_tensor_is_an_error_when_all_are_read(path):
    c = bitsparse.compress(random_sparse((300, 5), 0.2, torch.float32), "flat", "raw")
    bitsparse.save(path, {"a": c, "b": c})
    edit(path, lambda h, d: data_of(h, d, "b.bitsparse.mask").__setitem__(0, 255))
    with pytest.raises(ValueError, match=r"tensors.safetensors: 'b': nnz"):
        bitsparse.load(path)


def test_a_file_that_is_replaced_while_it_is_opened(path, monkeypatch):
    """The package opens a path twice."""
    bitsparse.save(path, {"old": torch.zeros(100)})
    real, calls = safetensors.safe_open, []

    def safe_open(*args, **kwargs):
        opened = real(*args, **kwargs)
        if not calls:
            bitsparse.save(path, {"new": torch.ones(3)})
        calls.append(opened)
        return opened

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    same(bitsparse.load(path)["new"], torch.ones(3))
    assert len(calls) == 2


# ---------------------------------------------------------------------- arguments, system


@pytest.mark.parametrize(
    "arguments,error,match",
    [
        ((3, {}), TypeError, "path: got int, allowed"),
        (("f", [1]), TypeError, "tensors: got list, allowed"),
        (("f", {1: torch.ones(1)}), TypeError, "name: got int, allowed: str"),
        (("f", {"a": 1.0}), TypeError, r"tensors\['a'\]: got float, allowed"),
        (("f", {"a": torch.ones(2).to_sparse()}), TypeError, r"tensors\['a'\].*allowed"),
        (("f", {"a": torch.ones(2, device="meta")}), TypeError, "meta"),
        (("f", {"a": torch.ones(2, dtype=torch.complex64)}), TypeError, "complex64, allowed"),
        (("f", {"a.bitsparse.b": torch.ones(1)}), ValueError, "'a.bitsparse.b', allowed"),
        (("f", {"__metadata__": torch.ones(1)}), ValueError, "'__metadata__', allowed"),
        (("f", {"\ud800": torch.ones(1)}), ValueError, "Unicode"),
        (("f", {}, ["a"]), TypeError, "metadata: got list, allowed"),
        (("f", {}, {"a": 1}), TypeError, r"metadata\['a'\]: got int, allowed: str"),
        (("f", {}, {1: "a"}), TypeError, "metadata: a key: got int"),
        (("f", {}, {"bitsparse": "a"}), ValueError, "metadata: got the key 'bitsparse'"),
        (("f", {}, {"a": "\udfff"}), ValueError, "Unicode"),
        (("f", {}, {"a": "x" * 100_000_000}), ValueError, "bytes of names.*allowed: 100000000"),
    ],
    ids=range(16),
)
def test_bad_arguments_change_nothing(tmp_path, monkeypatch, arguments, error, match):
    monkeypatch.chdir(tmp_path)
    Path("f").write_bytes(b"old")
    with pytest.raises(error, match=match):
        bitsparse.save(*arguments)
    assert os.listdir() == ["f"]
    assert Path("f").read_bytes() == b"old"


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        bitsparse.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="folder/file"):
        bitsparse.save(tmp_path / "folder" / "file", {})
    with pytest.raises(TypeError, match="path: got int"):
        bitsparse.load(3)
    with pytest.raises(ValueError, match="device: got 'nowhere', allowed"):
        bitsparse.load(tmp_path / "missing", device="nowhere")
    for call in (bitsparse.load, lambda p: bitsparse.save(p, {})):
        with pytest.raises(IsADirectoryError, match=tmp_path.name):
            call(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.timeout(20)
def test_pipes_and_devices(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{path}: got a pipe, device or socket, allowed"):
            bitsparse.load(path)
    with pytest.raises(OSError, match=f"Not a regular file: '{pipe}'"):
        bitsparse.save(pipe, {})
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and links")
def test_mode_and_links(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    old = os.umask(0o027)
    try:
        bitsparse.save(link, {"a": torch.ones(1)})
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert bitsparse.load(link).keys() == {"a"}


def test_without_safetensors(path, monkeypatch):
    bitsparse.save(path, {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'bitsparse\[files\]'"):
        bitsparse.load(path)


# ----------------------------------------------------------------------------- atomicity


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), MemoryError()]
)
@pytest.mark.parametrize("where", ["io._little_endian", "os.fsync", "os.replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, error, where, exists):
    path = tmp_path / "f"
    if exists:
        path.write_bytes(b"old")
    owner, name = where.split(".")
    owner = {"io": io, "os": os}[owner]
    real, calls = getattr(owner, name), []

    def fail(*args):
        calls.append(args)
        if name != "_little_endian" or len(calls) == 2:  # after one tensor
            raise error
        return real(*args)

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(type(error)):
        bitsparse.save(path, {"a": torch.ones(3), "b": torch.ones(10)})
    assert calls
    assert os.listdir(tmp_path) == (["f"] if exists else [])
    assert not exists or path.read_bytes() == b"old"


def run(code, *args, timeout=120):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
def test_a_file_system_that_is_full(tmp_path):
    path = tmp_path / "f"
    bitsparse.save(path, {"old": torch.ones(1)})
    code = """
        import resource, signal, sys
        import bitsparse, torch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            bitsparse.save(sys.argv[1], {"a": torch.ones(10_000), "b": torch.ones(100_000)})
        except OSError as error:
            print(error.errno)
        """
    assert run(code, path).strip() == str(errno.EFBIG)
    assert os.listdir(tmp_path) == ["f"]
    assert bitsparse.load(path).keys() == {"old"}


# ----------------------------------------------------------------------- damaged: the file


def take_apart(content):
    size = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:size]), bytearray(content[size:])


def put_together(header, data):
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text.encode()).to_bytes(8, "little") + text.encode() + bytes(data)


def edit(path, change):
    """``change(header, data)`` in place, keeping the data's length."""
    header, data = take_apart(path.read_bytes())
    change(header, memoryview(data))
    path.write_bytes(put_together(header, data))


def data_of(header, data, key):
    begin, end = header[key]["data_offsets"]
    return data[begin:end]


def file_of(tensors, index=None, metadata=None):
    """The bytes of a file with these plain entries and this index (a dict, or text)."""
    strings = dict(metadata or {})
    if index is not None:
        strings["bitsparse"] = index if isinstance(index, str) else json.dumps(index)
    header, data = {"__metadata__": strings}, b""
    for key, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[key] = {
            "dtype": io._SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return put_together(header, data)


def refused(path, content, match):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        bitsparse.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000


def accepted_or_refused(path, content):
    """Load and decode; whether it was accepted."""
    path.write_bytes(content)
    try:
        loaded = bitsparse.load(path)
    except ValueError as error:
        assert str(path) in str(error)
        return False
    for tensor in loaded.values():
        if isinstance(tensor, bitsparse.BitSparseTensor) and tensor.numel() < 1 << 22:
            decodes(tensor)
    return True


def decodes(c):
    dense = c.to_dense()
    assert (dense.shape, dense.dtype) == (c.shape, c.dtype)
    assert int(torch.count_nonzero(dtypes.to_patterns(dense))) == c.nnz


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 100,
        (1 << 62).to_bytes(8, "little") + b"{}",
        put_together("{}", b"1"),
        put_together("[]", b""),
        put_together('{"a":' * 50_000, b""),
        put_together('{"__metadata__":{"a":1}}', b""),
        put_together('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', b"12345678"),
        put_together('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"12345678"),
        put_together(
            '{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', b""
        ),
        put_together(
            '{"a":{"dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,0]}}', b""
        ),
        put_together(
            '{"a":{"dtype":"U8","shape":[0,4611686018427387904],"data_offsets":[0,0]}}', b""
        ),
        put_together('{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', b"123"),
        put_together('{"a":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}', b"\0\1\2"),
        put_together({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1"),
        b"PK\3\4" + b"\0" * 200,
    ],
    ids=range(19),
)
def test_what_is_no_safetensors_file(path, content):
    refused(path, content, ".")


def good():
    """Codings with every kind of buffer, in few bytes."""
    x = random_sparse((300, 5), 0.02, torch.bfloat16, signed=True)
    x *= torch.exp2(-3 * torch.arange(5)).bfloat16()  # some exponents escape
    y = random_sparse((41,), 0.5, torch.float32) * torch.exp2(torch.arange(41.0) % 30 - 30)
    return {
        "b": bitsparse.compress(x, "bucketed", "signed_exponent3"),
        "f": bitsparse.compress(y, "flat", "exponent4"),
        "u": bitsparse.compress(y[y != 0], "full", "unsigned"),
        "e": bitsparse.compress(torch.zeros(3, 4)),
        "d": bitsparse.compress(torch.ones(3, dtype=torch.float8_e5m2), values="dense"),
        "p": torch.arange(4),
    }


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("io") / "good"
    bitsparse.save(path, good(), {"k": "v"})
    return path.read_bytes()


def test_every_truncation_is_refused(path, good_file):
    assert accepted_or_refused(path, good_file)
    for end in [*range(0, len(good_file), 37), len(good_file) - 1]:
        refused(path, good_file[:end], ".")
    refused(path, good_file + b"\0", ".")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_bytes_do_no_harm(tmp_path_factory, good_file, data):
    content = bytearray(good_file)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "insert", "delete", "copy"]))
        size = data.draw(st.sampled_from([1, 2, 4, 8, 30]))
        if kind == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            content[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=size))
        elif kind == "delete":
            del content[at : at + size]
        else:
            content[at : at + size] = content[:size]
    accepted_or_refused(tmp_path_factory.getbasetemp() / "changed", bytes(content))


# ---------------------------------------------------------------------- damaged: the index


def entry(**changes):
    fields = {"shape": [2], "dtype": "float32", "nnz": 1, "support": "full", "values": "dense"}
    return {k: v for k, v in {**fields, **changes}.items() if v is not ...}


def index(fields=None, name="a", **changes):
    return {"version": 1, "tensors": {name: entry() if fields is None else fields}, **changes}


VALUES = {"a.bitsparse.values": torch.tensor([0, 1], dtype=torch.int32)}


@pytest.mark.parametrize(
    "text,match",
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("\ud800", "no version"),
        ("[" * 100_000, "nested too deeply"),
        ('{"version":' * 100_000, "nested too deeply"),
        ("null", "no version"),
        ("[]", "no version"),
        ("1", "no version"),
        ({}, "no version"),
        (index(version=None), "no version"),
        (index(version="1"), "no version"),
        (index(version=True), "no version"),
        (index(version=2), "got version 2, this release reads: 1"),
        ({"version": 2, "other": []}, "got version 2, this release reads: 1"),
        (index(version=0), "this release reads: 1"),
        ('{"version":1.0,"tensors":{}}', "whole numbers"),
        ('{"version":1,"tensors":{},"x":NaN}', "whole numbers"),
        ('{"version":-Infinity,"tensors":{}}', "whole numbers"),
        ('{"version":1,"version":1,"tensors":{}}', "a key twice"),
        ('{"version":1,"tensors":{"a":%s,"a":%s}}' % ((json.dumps(entry()),) * 2), "a key twice"),
        ('{"version":1,"tensors":{"a":{"nnz":1,"nnz":1}}}', "a key twice"),
        ('{"version":1,"tensors":{},"x":' + "9" * 10_000_000 + "}", "10000000 digits"),
        ({"version": 1}, "allowed: an object with"),
        (index(x=1), "allowed: an object with"),
        (index(tensors=[]), "not an object"),
        (index([]), "allowed: an object with"),
        (index(entry(nnz=...)), "allowed: an object with"),
        (index(entry(x=1)), "allowed: an object with"),
        (index(entry(shape=2)), "shape"),
        (index(entry(shape=["2"])), "shape"),
        (index(entry(shape=[True, 2])), "shape"),
        (index(entry(shape=[-2])), "shape"),
        (index(entry(shape=[2**61])), "shape"),
        (index(entry(shape=[2**40, 2**40])), "shape"),
        (index(entry(shape=[10**30])), "31 digits"),
        (index(entry(shape=[1] * 65)), "65 dimensions"),
        (index(entry(shape=[1] * 1_000_000)), "dimensions"),
        (index(entry(shape=[3])), "values"),
        (index(entry(nnz=True)), "nnz"),
        (index(entry(nnz="1")), "nnz"),
        (index(entry(nnz=2)), "nnz"),
        (index(entry(nnz=3)), "nnz"),
        (index(entry(nnz=-1)), "nnz"),
        (index(entry(dtype="float64")), "dtype"),
        (index(entry(dtype="float16")), "values"),
        (index(entry(dtype=1)), "dtype"),
        (index(entry(dtype=["float32"])), "dtype"),
        (index(entry(support="other")), "support"),
        (index(entry(support="auto")), "support"),
        (index(entry(support=None)), "support"),
        (index(entry(support="empty")), "values"),
        (index(entry(support="flat")), "support|entries"),
        (index(entry(values="exponent")), "values"),
        (index(entry(values="raw")), "entries"),
        (index(entry(values="x" * 10_000_000)), "values"),
        (index(name="b"), "not in its index"),
        (index(name="a" * 10_000_000), "not in its index"),
        (index(name="a.bitsparse.b"), "name"),
        (index(name="__metadata__"), "name"),
        (index(tensors={}), "not in its index"),
        (index(tensors={"a": entry(), "b": entry()}), "'b' has the entries"),
    ],
    ids=range(61),
)
def test_bad_indexes(path, text, match):
    if isinstance(text, str) and not text.isascii():
        text = json.dumps(text)
    content = file_of(VALUES, text)
    refused(path, content, match)


def test_entries_that_are_not_those_of_the_index(path):
    path.write_bytes(file_of(VALUES, index()))
    assert dtypes.to_patterns(bitsparse.load(path)["a"].to_dense()).tolist() == [0, 1]
    one = torch.ones(1)
    refused(path, file_of({**VALUES, "a": one}, index()), "both a plain and a compressed")
    refused(path, file_of({**VALUES, "b.bitsparse.values": one}, index()), "not in its index")
    refused(path, file_of({**VALUES, "b.bitsparse.": one}, index()), "not in its index")
    refused(path, file_of({**VALUES, "a.bitsparse.mask": one}, index()), "'a' has the entries")
    refused(path, file_of({}, index()), "'a' has the entries")
    many = {f"a.bitsparse.{i}": one for i in range(3000)}
    refused(path, file_of({**VALUES, **many}, index()), "'a' has the entries")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
WORDS = ["empty", "dense", "auto", *codings.SUPPORTS, *codings.VALUES, *io._DTYPES]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_indexes_do_no_harm(tmp_path_factory, good_file, data):
    header, content = take_apart(good_file)
    found = json.loads(header["__metadata__"]["bitsparse"])
    tensors = found["tensors"]
    target = data.draw(st.sampled_from([found, tensors, *tensors.values(), *tensors.values()]))
    key = data.draw(st.sampled_from(sorted(target)))
    old = target[key]
    kind = data.draw(st.sampled_from(["any", "drop", "add", "near", "near", "near"]))
    if kind == "drop":
        del target[key]
    elif kind == "add":
        target[data.draw(st.text(max_size=3))] = data.draw(JSON)
    elif kind == "near" and isinstance(old, str):
        target[key] = data.draw(st.sampled_from(WORDS))
    elif kind == "near" and isinstance(old, int):
        target[key] = old + data.draw(st.integers(-3, 3) | st.integers(-(2**64), 2**64))
    elif kind == "near" and isinstance(old, list):
        sizes = st.sampled_from([*old, 1, 2, 5, 64, 299, 1 << 40])
        target[key] = data.draw(st.permutations(old) | st.lists(sizes, max_size=4))
    else:
        target[key] = data.draw(JSON)
    header["__metadata__"]["bitsparse"] = json.dumps(found)
    path = tmp_path_factory.getbasetemp() / "changed"
    accepted_or_refused(path, put_together(header, content))


# -------------------------------------------------------------------- damaged: the buffers


@pytest.mark.parametrize("name", ["b", "f", "u", "e", "d"])
def test_buffers_of_another_kind(path, name):
    c = good()[name]
    keys = {f"{name}.bitsparse.{b}": buffer for b, buffer in c.buffers.items()}
    fields = {"shape": list(c.shape), "dtype": str(c.dtype)[6:], "nnz": c.nnz}
    fields |= {"support": c.support, "values": c.values}

    def changed(key, new):
        entries = {k: v for k, v in {**keys, key: new}.items() if v is not None}
        refused(path, file_of(entries, index(fields, name)), name)

    assert accepted_or_refused(path, file_of(keys, index(fields, name)))
    for key, buffer in keys.items():
        changed(key, None)
        changed(key, buffer[None])
        changed(key, buffer[:, None] if buffer.numel() else buffer[None])
        changed(key, torch.cat([buffer, buffer[-1:] if buffer.numel() else buffer.new_ones(1)]))
        if buffer.numel():
            changed(key, buffer[:-1])
            changed(key, buffer[:0])
        for dtype in (torch.int64, torch.float32, torch.uint8, torch.int16, torch.bool):
            if dtype != buffer.dtype:
                changed(key, buffer.to(dtype))
    for nnz in {0, 1, c.nnz - 1, c.nnz + 1, c.numel()} - {c.nnz}:
        refused(path, file_of(keys, index({**fields, "nnz": nnz}, name)), "nnz|values|offsets")


@pytest.mark.parametrize("name", ["b", "f", "u"])
def test_every_changed_bit_is_refused_or_decoded(name):
    """Every other bit of each buffer, through the checks that a file goes through."""
    c = good()[name]
    accepted = 0
    for buffer in c.buffers:
        for at in range(c.buffers[buffer].nbytes):
            for bit in range(at % 2, 8, 2):
                parts = {n: b.clone() for n, b in c.buffers.items()}
                parts[buffer].view(torch.uint8)[at] ^= 1 << bit
                try:
                    changed = bitsparse.BitSparseTensor.from_buffers(
                        c.shape, c.dtype, c.nnz, c.support, c.values, parts
                    )
                except ValueError:
                    continue
                assert buffer in ("values", "exponents", "escapes")  # each position is needed
                decodes(changed)
                accepted += 1
    assert accepted


def test_positions_outside_the_tensor_are_refused():
    """As many as before, in a row that the last block lacks, or after the last element."""
    for shape, outside in (((300, 5), 5 * 64 * 5 - 1), ((90,), 95)):
        x = torch.zeros(shape)
        x.view(-1)[0] = 1
        for support in ("flat", "bucketed"):
            c = bitsparse.compress(x, support, "raw")
            parts = {n: b.clone() for n, b in c.buffers.items()}
            if support == "flat":
                parts["mask"][0] = 0
                parts["mask"].view(torch.uint8)[outside // 8] = 1 << outside % 8
            else:
                group = outside // 64
                parts["groups"].zero_()
                parts["groups"].view(torch.uint8)[group // 8] = 1 << group % 8
                parts["buckets"][:] = torch.tensor([1 << outside % 64 // 8, 1 << outside % 8])
            with pytest.raises(ValueError, match="mask: got a bit that is set outside"):
                bitsparse.BitSparseTensor.from_buffers(
                    c.shape, c.dtype, c.nnz, c.support, c.values, parts
                )


def test_parts_are_checked_across_many_tiles(monkeypatch):
    """Steps shorter than the tensor, and values that straddle them."""
    from bitsparse import tensor
    from bitsparse.codings import words

    monkeypatch.setattr(tensor, "_CHECKED_TILES", 2)
    monkeypatch.setattr(words, "STEP", 64)
    x = random_sparse((700, 33), 0.03, torch.float32) * torch.exp2(-torch.arange(33.0))
    x[:128] = 0  # a tile without values
    for support in codings.SUPPORTS:
        for values in codings.VALUES:
            y = x.clamp(min=1e-9) if support == "full" else x
            c = bitsparse.compress(y, support, values)
            parts = (c.shape, c.dtype, c.nnz, c.support, c.values)
            same(bitsparse.BitSparseTensor.from_buffers(*parts, c.buffers), c)
            for name in ("offsets", "bucket_offsets", "escape_offsets", "escapes"):
                if name in c.buffers and c.buffers[name].numel():
                    for at in (0, c.buffers[name].numel() // 3, -1):
                        buffers = {n: b.clone() for n, b in c.buffers.items()}
                        buffers[name][at] += 1
                        if name == "escapes":
                            buffers[name] = buffers[name][1:]
                        with pytest.raises(ValueError, match=name[:6]):
                            bitsparse.BitSparseTensor.from_buffers(*parts, buffers)


# ------------------------------------------------------------------------------- memory


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
def test_claimed_sizes_take_no_memory(tmp_path):
    """2**40 elements, and 256 MiB of address space to read them."""
    huge = [1 << 40]
    none, words = torch.zeros(0, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
    good = file_of({"a.bitsparse.values": none}, index(entry(shape=huge, nnz=0, support="empty",
                   values="raw")))  # fmt: skip
    bad = []
    for support in codings.SUPPORTS:
        for values in ("dense", *codings.VALUES):
            for nnz in (0, 1, 1 << 40):
                for buffer in (none, words):
                    names = bitsparse.tensor.buffer_names(support, values)
                    entries = {f"a.bitsparse.{n}": buffer for n in names}
                    claim = entry(shape=huge, nnz=nnz, support=support, values=values)
                    bad.append(file_of(entries, index(claim)))
    claim = entry(shape=[1 << 30, 1 << 30], nnz=1 << 60)
    bad.append(file_of({"a.bitsparse.values": none}, index(claim)))
    claim = entry(shape=[1], dtype="bfloat16", nnz=1 << 59, support="flat", values="raw")
    bad.append(file_of({f"a.bitsparse.{n}": words for n in ("mask", "offsets", "values")},
               index(claim)))  # fmt: skip
    bad.append((1 << 40).to_bytes(8, "little") + b"{}")
    (tmp_path / "good").write_bytes(good)
    for i, content in enumerate(bad):
        (tmp_path / f"bad{i}").write_bytes(content)
    code = """
        import resource, sys, torch, bitsparse.backends
        from pathlib import Path
        torch.set_num_threads(1)
        folder = Path(sys.argv[1])
        with bitsparse.backends.force_backend("reference"):
            c = bitsparse.compress(torch.zeros(9))
        bitsparse.save(folder / "warm", {"a": c})
        bitsparse.load(folder / "warm")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            torch.zeros(1 << 28)
        except (RuntimeError, MemoryError):
            pass
        else:
            sys.exit("no limit")
        c = bitsparse.load(folder / "good")["a"]
        assert (c.shape, c.nnz, c.nbytes) == ((1 << 40,), 0, 0), c
        for path in sorted(folder.glob("bad*")):
            try:
                c = bitsparse.load(path)
            except ValueError:
                continue
            sys.exit(f"{path.name} was accepted: {c}")
        print("done")
        """
    assert run(code, tmp_path).strip() == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs Linux")
@pytest.mark.skipif(not (ROOT / "fuzz").is_dir(), reason="needs the source tree")
def test_the_fuzzer_runs(tmp_path):
    options = ["--seconds", "3", "--seed", "1", "--backends", "reference"]
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "fuzz" / "fuzz_load.py",
            *options,
            "--findings",
            tmp_path / "found",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "findings: 0" in done.stdout
    assert not (tmp_path / "found").exists()
