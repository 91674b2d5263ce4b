"""``bitsparse plan`` from the command line."""

import json

import pytest

from bitsparse.cli import app

TINY = (
    *("--layers", "2", "--d-model", "64", "--heads", "2", "--seq-len", "64"),
    *("--batch-size", "4"),
)


@pytest.fixture
def plan(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["bitsparse", "plan", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        status = app.run()
        return status, *capsys.readouterr()

    return run


def test_it_prints_what_each_mode_takes_and_recommends_one(plan):
    status, out, _ = plan(*TINY, "--memory-gb", "1", "--modes", "dense,compressed")
    assert status == 0
    for text in ("feed-forward", "optimizer state", "largest batch", "recommended: dense"):
        assert text in out


def test_json(plan):
    status, out, _ = plan(*TINY, "--json", "--density", "0.05,0.2", "--activation", "reglu")
    found = json.loads(out)
    assert status == 0
    assert [m["mode"] for m in found["modes"]] == ["dense", "checkpoint", "compressed", "chunked"]
    for mode in found["modes"]:
        parts = sum(k["forward"] + k["backward"] for k in mode["by_kind"].values())
        assert mode["peak_bytes"] == parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", -3), "--batch-size: got -3"),
        (("--density", "1.2"), "--density: got 1.2"),
        (("--density", "0.1,0.1,0.1"), "--density: got 3 numbers"),
        (("--heads", "3"), "--heads: got 3 with --d-model 64"),
        (("--d-model", "0"), "--d-model: got 0"),
        (("--activation", "gelu"), "--activation: got 'gelu'"),
        (("--preset", "huge"), "--preset: got 'huge'"),
        (("--codec", "best"), "--codec: got 'best'"),
        (("--tokens-per-chunk", "0"), "--tokens-per-chunk: got 0"),
        (("--config", "/nowhere"), "--d-model: got a value with --config"),
    ],
)
def test_bad_input_is_one_line(plan, arguments, message):
    status, _, err = plan(*TINY, *arguments)
    assert status == 1
    assert err.startswith("error: ") and message in err


def test_a_missing_configuration(plan):
    status, _, err = plan("--config", "/nowhere/config.json")
    assert status == 1 and "--config: /nowhere/config.json: No such file" in err
