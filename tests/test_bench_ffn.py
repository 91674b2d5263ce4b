"""`bitsparse bench ffn`: peers, their checks and their ratios."""

import json
import runpy
import statistics
import sys
import weakref
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bitsparse
from bitsparse.activations import ACTIVATIONS
from bitsparse.backends import force_backend
from bitsparse.bench import ffn, peers
from bitsparse.bench.ffn import FfnConfig, PeerResult, judge, run_ffn
from bitsparse.bench.peers import DEFAULT_PEERS, PEERS
from bitsparse.cli.app import app
from bitsparse.training.errors import UserError
from helpers import assert_refused

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("--device", "cpu", "--shapes", "256x32x64", "--layers", "2", "--repeats", "3")
NO_COMPILER = tuple(name for name in DEFAULT_PEERS if not PEERS[name].compiled)

OWN = """
from functools import partial
import torch, bitsparse
from torch.nn import functional as F

def right(activation, weights):
    assert activation == "relu2" and sorted(weights) == ["w_down", "w_up"]
    return partial(bitsparse.ffn, activation=activation, memory="dense", **weights)

def wrong(activation, weights):
    return lambda x: right(activation, weights)(x) * 1.001

def copies(activation, weights):
    mine = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    return partial(bitsparse.ffn, activation=activation, memory="dense", **mine)

def fails(activation, weights):
    def run(x):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return run

value = 3
"""


@pytest.fixture(autouse=True)
def reference_backend():
    """Nothing to compile, and no threads: the tensors here are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with force_backend("reference"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of factories in the working directory."""
    (tmp_path / "own_peers.py").write_text(OWN)
    (tmp_path / "broken_peers.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own_peers", "broken_peers"):
        sys.modules.pop(name, None)


def command(*arguments: object):
    return CliRunner().invoke(
        app, ["bench", "ffn", *QUICK, *map(str, arguments)], env={"COLUMNS": "200"}
    )


# ------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("activation", ["relu2", "reglu", "drelu"])
def test_peers_have_the_bits_of_eager(activation):
    config = FfnConfig(
        ((128, 32, 64),), (2,), (activation,), peers=NO_COMPILER, repeats=1, device="cpu"
    )
    (case,) = run_ffn(config).cases
    assert [p.peer for p in case.peers] == list(NO_COMPILER)
    for peer in case.peers:
        if peer.peer == "sqrt" and activation != "relu2":
            assert peer.failed == "computes relu2 only"
        elif peer.peer == "chunked":  # adds weight gradients up in another order
            assert peer.failed is None
        else:
            assert peer.failed is None and peer.identical, (peer.peer, peer.differing)
            assert peer.kept_bytes and peer.peak_bytes and peer.seconds
    assert len(case.densities) == 2
    kept = {p.peer: p.kept_bytes for p in case.peers if p.kept_bytes}
    assert kept["checkpoint"] < kept["selective"] <= kept["eager"]
    assert kept["compressed"] < kept["eager"]


def test_compiled_peers_are_told_apart(monkeypatch):
    """Each has its own code object; without one the second would be given the first's graph."""
    compiled = []

    def fake(function, dynamic):
        compiled.append((function, torch._functorch.config.activation_memory_budget))
        return function

    monkeypatch.setattr(torch, "compile", fake)
    weights = ffn.make_weights(8, 16, "relu", 0.1, torch.float32, torch.device("cpu"), 0)
    for name in ("compile", "budget", "compile-stack"):
        stack = PEERS[name].build("relu", [weights], peers.Options())
        expected = PEERS["eager"].build("relu", [weights], peers.Options())
        x = torch.randn(4, 8)
        assert torch.equal(stack(x), expected(x))
    assert len({id(function.__code__) for function, _ in compiled}) == 3


def test_densities_share_what_is_compiled(monkeypatch):
    compiled, resets = [], []

    def fake(function, dynamic):
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(compiled)))
    config = FfnConfig(
        *(((64, 16, 32),), (1,), ("relu", "relu2"), (0.3, 0.1)),
        peers=("compile", "budget", "compile-stack"),
        repeats=1,
        device="cpu",
    )
    cases = run_ffn(config).cases
    assert all(peer.identical for case in cases for peer in case.peers)  # with weights of its own
    assert len(compiled) == 2 * 3 and resets == [0, 3, 6]


def test_square_root_gives_back_relu():
    config = FfnConfig(
        ((512, 32, 64),), activations=("relu2",), peers=("sqrt",), dtype="bfloat16", repeats=1
    )
    (case,) = run_ffn(config).cases
    assert case.peers[1].identical


def test_densities_are_near_what_is_asked():
    for activation in ACTIVATIONS:
        config = FfnConfig(
            ((512, 128, 256),), (2,), (activation,), (0.1,), peers=("eager",), repeats=1
        )
        (case,) = run_ffn(config).cases
        assert all(0.07 < d < 0.15 for d in case.densities), (activation, case.densities)


# ------------------------------------------------------------------------------ ratios


def test_ratios_by_hand():
    eager = PeerResult("eager", rounds=[2.0, 4.0, 2.0], peak_bytes=100, kept_bytes=50)
    compiled = PeerResult("compile", rounds=[1.0, 1.0, 4.0], peak_bytes=80, kept_bytes=60)
    other = PeerResult("other", rounds=[3.0, 3.0, 3.0], peak_bytes=40, kept_bytes=None)
    failed = PeerResult("failed", failed="why")
    assert judge([eager, compiled, other, failed]) == "compile"
    assert (other.ratio_first, other.ratio_first_quartiles) == (1.5, (1.125, 1.5))
    assert other.ratio_best == 3.0  # of 3, 3 and 0.75
    assert (other.peak_ratio_first, other.peak_ratio_best) == (0.4, 0.5)
    assert other.kept_ratio_first is None
    assert (eager.ratio_first, eager.kept_ratio_best) == (1.0, 1.0)
    assert failed.ratio_first is None


# ----------------------------------------------------------------------------- command


def test_the_command(own):
    out, chart = own / "ffn.json", own / "ffn.png"
    done = command(
        *("--activations", "relu2", "--peers", "compressed,fast,checkpoint"),
        *("--peer", "own_peers:right", "--peer", "own_peers:wrong", "--peer", "own_peers:copies"),
        *("--peer", "own_peers:fails", "--output-json", out, "--plot", chart),
    )
    assert done.exit_code == 0, done.output
    assert "own_peers:fails: failed, out of memory" in done.output
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    assert content["benchmark"] == "ffn"
    assert {"device", "torch", "git_commit"} <= set(content["environment"])
    (case,) = content["cases"]
    assert (case["tokens"], case["d_model"], case["d_ff"], case["layers"]) == (256, 32, 64, 2)
    found = {p["peer"]: p for p in case["peers"]}
    names = ["eager", "compressed", "fast", "checkpoint"]
    assert list(found) == [
        *names,
        *(f"own_peers:{n}" for n in ("right", "wrong", "copies", "fails")),
    ]
    for name in (*names, "own_peers:right"):
        assert found[name]["same_output"] and found[name]["same_gradients"], name
        assert found[name]["differing"] == []
    wrong, copies = found["own_peers:wrong"], found["own_peers:copies"]
    assert wrong["same_output"] is False and "gradient of x" in wrong["differing"]
    assert copies["same_output"] is True and copies["same_gradients"] is False
    assert copies["differing"][0] == "gradient of w_up, layer 0"
    assert found["own_peers:fails"]["failed"] == "out of memory"
    assert found["own_peers:fails"]["rounds"] == []
    eager = found["eager"]
    for peer in found.values():
        if peer["failed"] is None:
            ratios = [a / b for a, b in zip(peer["rounds"], eager["rounds"], strict=True)]
            assert peer["ratio_first"] == pytest.approx(statistics.median(ratios))
            assert peer["ratio_best"] == peer["ratio_first"]  # nothing was compiled
            assert peer["seconds"]["median"] == pytest.approx(statistics.median(peer["rounds"]))
            assert peer["kept_ratio_first"] == peer["kept_bytes"] / eager["kept_bytes"]
            assert peer["peak_ratio_first"] == peer["peak_bytes"] / eager["peak_bytes"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    ((header, lines),) = table["long_tables"](out)
    assert header == table["FFN"] and len(lines) == len(found)
    assert all(line.count("|") == table["FFN"].splitlines()[0].count("|") for line in lines)
    assert any("| own_peers:wrong |" in line and line.endswith("| NO |") for line in lines)
    assert any("| own_peers:fails | failed: out of memory |" in line for line in lines)
    assert "density 0.1, float32" in table["caption"](out)


def test_a_peer_without_a_compiler_fails_alone(monkeypatch):
    def no_compiler(function, dynamic):
        def run(*args):
            raise RuntimeError("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", no_compiler)
    config = FfnConfig(
        ((128, 16, 32),),
        activations=("relu", "reglu"),
        peers=("compile", "budget", "compressed"),
        repeats=1,
        device="cpu",
    )
    for case in run_ffn(config).cases:
        failed = {p.peer: p.failed for p in case.peers}
        assert failed["compile"] == failed["budget"] == "RuntimeError: no compiler"
        assert failed["eager"] is failed["compressed"] is None
        assert case.best == "eager"


def test_chunked_is_given_its_tokens(monkeypatch):
    given = []
    real = bitsparse.ffn

    def chunked(x, w_up, w_down, *, tokens_per_chunk=None, **options):
        given.append(tokens_per_chunk)
        return real(x, w_up, w_down, **options)

    monkeypatch.setattr(bitsparse, "ffn", chunked)
    for asked, tokens in ((None, 64), (50, 50)):
        config = FfnConfig(
            ((128, 16, 32),), peers=("chunked",), repeats=1, tokens_per_chunk=asked, device="cpu"
        )
        assert run_ffn(config).cases[0].peers[1].identical
        assert set(given) == {tokens}
        given.clear()


def test_results_are_written_after_each_peer(tmp_path, monkeypatch):
    out = tmp_path / "ffn.json"
    real = ffn.Case.check

    def stop(case, result, *arguments):
        if case.activation == "relu2" and result.peer == "fast":
            raise KeyboardInterrupt
        return real(case, result, *arguments)

    monkeypatch.setattr(ffn.Case, "check", stop)
    options = ("--peers", "compressed,fast", "--activations", "relu,relu2", "--output-json", out)
    command(*options)
    finished, broken = json.loads(out.read_text())["cases"]
    assert finished["took"] > 0 and finished["best"] == "eager"
    assert broken["took"] is None and broken["best"] is None
    eager, compressed, fast = broken["peers"]
    assert eager["peak_bytes"] > 0 and compressed["same_gradients"] is True
    assert fast["peak_bytes"] is None and eager["seconds"] is None
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    assert len(table["long_tables"](out)[0][1]) == 6  # an unfinished file can be shown
    assert table["compact_tables"](out)

    monkeypatch.setattr(ffn.Case, "check", real)
    assert command(*options, "--resume").exit_code == 0
    first, second = json.loads(out.read_text())["cases"]
    assert first == finished  # taken over, and the other one measured
    assert all(peer["seconds"] is not None for peer in second["peers"])


def test_densities_and_precisions(tmp_path, monkeypatch):
    out = tmp_path / "ffn.json"
    monkeypatch.setattr(ffn, "allocated_by", lambda run, device: (run(), 2))  # for speed
    monkeypatch.setattr(ffn, "step_peak", lambda device, run: (run(), 3))
    monkeypatch.setattr(ffn, "forget", lambda error=None: None)
    done = command(
        *("--dtype", "bfloat16", "--activations", ",".join(ACTIVATIONS), "--repeats", 1),
        *("--densities", "0.4,0.1", "--precisions", "none,fp8", "--layers", 1),
        *("--peers", "checkpoint,sqrt,compressed", "--output-json", out),
    )
    assert done.exit_code == 0, done.output
    cases = json.loads(out.read_text())["cases"]
    assert [(c["activation"], c["precision"], c["density"]) for c in cases] == [
        (a, p, d) for a in ACTIVATIONS for p in ("none", "fp8") for d in (0.4, 0.1)
    ]
    for case in cases:
        assert case["densities"][0] == pytest.approx(case["density"], rel=0.5)
        names = [peer["peer"] for peer in case["peers"]]
        if case["precision"] == "fp8":  # compared with the same computation, kept dense
            assert (case["first"], case["best"]) == ("dense", "dense")
            assert names == ["dense", "checkpoint", "compressed"]
            assert all(p["same_output"] and p["same_gradients"] for p in case["peers"])
        else:
            assert case["first"] == "eager"
            assert names == ["eager", "checkpoint", "sqrt", "compressed"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    for header, lines in table["tables"](out):
        assert len({line.count("|") for line in (*header.splitlines(), *lines)}) == 1, header
    (_, plain), (fp8_header, fp8_lines) = table["long_tables"](out)
    assert "same bits as dense" in fp8_header and len(fp8_lines) == 5 * 2 * 3
    assert "| relu, density 0.4 |" in plain[0] and "| relu, density 0.4, fp8 |" in fp8_lines[0]
    headers = [header.split(" | ")[0] for header, _ in table["compact_tables"](out)]
    assert headers == [
        *("| step, × eager", "| peak, × eager", "| kept, × eager"),
        *("| step, × dense (fp8)", "| peak, × dense (fp8)", "| kept, × dense (fp8)"),
    ]
    step_lines = table["compact_tables"](out)[0][1]
    assert len(step_lines) == 10 and "| – |" in step_lines[0]  # sqrt does not do relu
    assert "density 0.4, 0.1, bfloat16, fp8, median" in table["caption"](out)


def test_fp8_keeps_less_dense_and_less_again_compressed():
    config = FfnConfig(
        *(((128, 32, 64),), (1,), ("relu2",), (0.1,), "bfloat16", ("none", "fp8")),
        peers=("compressed",),
        repeats=1,
        device="cpu",
    )
    plain, fp8 = run_ffn(config).cases
    kept = [peer.kept_bytes for case in (plain, fp8) for peer in case.peers]
    eager, _, dense, compressed = (nbytes or 0 for nbytes in kept)
    assert eager > dense > compressed > 0


def test_a_case_leaves_nothing_in_memory(monkeypatch):
    """While one is measured, no tensor of the one before is there."""
    alive: list[weakref.ref] = []
    real = ffn.Case.measure

    def measure(case, *arguments):
        assert [ref for ref in alive if ref() is not None] == []
        tensors = [case.x, case.grad, *(w for layer in case.layers for w in layer.values())]
        alive.extend(weakref.ref(t) for t in tensors)
        return real(case, *arguments)

    def fails(activation, layers, options):
        kept = torch.ones(1)

        def run(x):
            alive.append(weakref.ref(kept))
            raise RuntimeError("no")

        return run

    monkeypatch.setattr(ffn.Case, "measure", measure)
    monkeypatch.setitem(PEERS, "selective", peers.Peer("selective", fails))
    shapes = ((64, 16, 32), (32, 16, 32))
    config = FfnConfig(shapes, (2,), ("reglu",), peers=NO_COMPILER, repeats=1, device="cpu")
    assert len(run_ffn(config).cases) == 2
    assert len(alive) == 2 * (2 + 2 * 3 + 1) and all(ref() is None for ref in alive)


def test_a_time_limit_leaves_cases_for_later(tmp_path):
    out = tmp_path / "ffn.json"
    options = ("--peers", "compressed", "--activations", "relu,drelu", "--output-json", out)
    done = command(*options, "--time-limit", 0)
    assert done.exit_code == 0, done.output
    assert "time limit: not measured: 256x32x64 drelu 0.1" in done.output
    first = json.loads(out.read_text())
    assert [c["activation"] for c in first["cases"]] == ["relu"]  # one always is
    assert first["skipped"] == ["256x32x64 drelu 0.1"]
    done = command(*options, "--resume", "--time-limit", 100)
    assert done.exit_code == 0, done.output
    second = json.loads(out.read_text())
    assert second["cases"][0] == first["cases"][0] and second["skipped"] == []
    assert [c["activation"] for c in second["cases"]] == ["relu", "drelu"]


def test_resume_takes_over_nothing_else(tmp_path):
    out = tmp_path / "ffn.json"
    options = ("--peers", "eager", "--activations", "relu", "--output-json", out)
    assert command(*options, "--resume").exit_code == 0  # no file: all is measured
    assert_refused(command(*options, "--resume", "--seed", 3), "--resume: got a file that differs")
    content = json.loads(out.read_text())
    content["environment"]["device"] = "another"
    out.write_text(json.dumps(content))
    assert_refused(command(*options, "--resume"), "differs in device; allowed: one of the same")
    out.write_text("{")
    assert_refused(command(*options, "--resume"), "cannot be used")
    assert_refused(command("--resume"), "--resume: got no --output-json")


def test_layers_by_shape():
    config = FfnConfig(((64, 8, 8), (32, 8, 8)), (4, 8), ("relu",))
    assert config.cases() == [
        ((64, 8, 8), 4, "relu", "none", 0.1),
        ((32, 8, 8), 8, "relu", "none", 0.1),
    ]


ERRORS: dict[str, tuple[str, ...]] = {
    "--shapes: got '12x3', allowed: TOKENSxD_MODELxD_FF": ("--shapes", "12x3"),
    "--shapes: got 0x4x4, allowed": ("--shapes", "0x4x4"),
    "--shapes: got none": ("--shapes", ""),
    "--layers: got 0, allowed": ("--layers", "0"),
    "--layers: got 2 numbers for 1 shapes": ("--layers", "1,2"),
    "--layers: got 'x', allowed: whole numbers": ("--layers", "x"),
    "--activations: got 'gelu', allowed: relu": ("--activations", "gelu"),
    "--densities: got 0, allowed: more than 0": ("--densities", "0.1,0"),
    "--dtype: got 'int8', allowed": ("--dtype", "int8"),
    "--peers: got 'x', allowed: eager, compile": ("--peers", "x"),
    "--peer: got 'x', allowed: module:factory": ("--peer", "x"),
    "--peer: got 'no_such_module:f', which cannot be imported": ("--peer", "no_such_module:f"),
    "--peer: got 'broken_peers:f', which cannot be imported": ("--peer", "broken_peers:f"),
    "but own_peers has no such function": ("--peer", "own_peers:nothing"),
    "'own_peers:value', but own_peers has no such function": ("--peer", "own_peers:value"),
    "--densities: got none, allowed: at least one": ("--densities", ""),
    "--precisions: got 'fp4', allowed: none, fp8": ("--precisions", "fp4"),
    "--precisions: got fp8 with --dtype float32, allowed: none, or": ("--precisions", "fp8"),
    "--time-limit: got -1.0, allowed": ("--time-limit", "-1"),
    "--tokens-per-chunk: got 0, allowed": ("--tokens-per-chunk", "0"),
    "--repeats: got 0, allowed": ("--repeats", "0"),
    "--max-seconds: got -1.0, allowed": ("--max-seconds", "-1"),
    "--output-json: got missing/x.json, allowed": ("--output-json", "missing/x.json"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_options(message, own):
    done = command(*ERRORS[message])
    assert_refused(done, message)


def test_an_eager_that_does_not_fit_is_an_error(monkeypatch):
    def fail(activation, layers, options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(PEERS, "eager", peers.Peer("eager", fail))
    monkeypatch.setattr(ffn.Case, "densities", lambda self: [0.1])
    with pytest.raises(UserError, match="eager cannot run 2048x256x1024"):
        run_ffn(FfnConfig(repeats=1, peers=("eager",), device="cpu"))
