"""Reports of profiles, the commands that make both, and loggers."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bitsparse.profiling import load
from bitsparse.profiling.charts import charts, short_names
from bitsparse.profiling.live import StepMetrics, TensorBoardLogger, WandbLogger
from bitsparse.profiling.report import save_html, save_pngs, summary, table
from profile_helpers import profiled, stack

TINY = (
    *("--device", "cpu", "--layers", "2", "--d-model", "32", "--heads", "2"),
    *("--seq-len", "16", "--batch-size", "4", "--dtype", "float32"),
)


@pytest.fixture(scope="module")
def profile():
    return profiled(stack(), steps=3, timed=True)


def test_charts_show_the_rows(profile):
    found = {chart.key: chart for chart in charts(profile)}
    assert list(found) == [
        "density", "training", "timeline", "savings", "bits", "kinds", "exponents", "times",
    ]  # fmt: skip
    last = profile.at("layers", 2)
    density = found["density"].series[0]
    assert density.x == ["0", "1"]
    assert density.y == [row["density"] for row in last]
    dense, compressed = found["savings"].series
    assert dense.y == [row["dense_bytes"] / 2**20 for row in last]
    assert compressed.y == [row["compressed_bytes"] / 2**20 for row in last]
    assert [series.x for series in found["training"].series] == [[0, 1, 2]] * 2
    rows = profile.at("timeline", 2)
    lines = {series.name: series.y for series in found["timeline"].series}
    assert max(lines["dense"]) * 2**20 == profile.steps[-1]["dense_bytes"]
    assert len(lines["measured"]) == len(rows)
    assert sum(found["exponents"].series[0].y) == pytest.approx(1)
    kinds = dict(zip(found["kinds"].series[0].x, found["kinds"].series[0].y, strict=True))
    assert sum(kinds.values()) * 2**20 == profile.steps[-1]["saved_bytes"]
    assert kinds["feed-forward"] * 2**20 == profile.steps[-1]["feed_forward_bytes"]


def test_charts_of_one_step_without_times():
    found = {chart.key for chart in charts(profiled(stack()))}
    assert "training" not in found and "times" not in found and "density" in found


def test_short_names():
    assert short_names(["a.0.ffn", "a.1.ffn"]) == {"a.0.ffn": "0", "a.1.ffn": "1"}
    assert short_names(["a.0.x", "b.0.x"]) == {"a.0.x": "a", "b.0.x": "b"}
    assert short_names(["a.b"]) == {"a.b": "a.b"}
    assert short_names(["", "a.b"]) == {"": "", "a.b": "a.b"}
    assert short_names(["a", "a.a"]) == {"a": "a", "a.a": "a.a"}


def test_text(profile):
    columns, lines = table(profile)
    assert all(len(line) == len(columns) for line in lines) and len(lines) == 2
    items = dict(summary(profile))
    assert items["model"] == "Stack" and items["steps looked at"] == "3, the last is 2"


def written(profile, path, **options):
    pytest.importorskip("plotly")
    save_html(profile, path, **options)
    text = path.read_text()
    return text, re.sub(r'(<script id="plotly"[^>]*>)[^<]*', r"\1", text)


def test_a_page_needs_nothing_else(profile, tmp_path):
    text, page = written(profile, tmp_path / "r.html", title="a <b> & c")
    assert len(text) < 4e6
    assert not re.search(r"https?://|@@|<link(?! rel=\"icon\")|@import|\bsrc=|url\(", page)
    assert page.count("a &lt;b&gt; &amp; c") == 2 and "a <b>" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])
    assert [c["key"] for c in data["charts"]] == [c.key for c in charts(profile)]
    assert [(p["tokens"], p["neurons"]) for p in data["positions"]] == [(80, 48)] * 2


def test_names_cannot_leave_their_place(tmp_path):
    result = profiled(stack())
    for row in (*result.layers, *result.positions):
        row["layer"] = "</script><img src=x onerror=alert(1)>" + row["layer"][-1]
    result.header["model"] = "<img src=x>"
    _, page = written(result, tmp_path / "r.html")
    assert "<img" not in page and page.count("</script>") == 3


def test_png_files(profile, tmp_path):
    files = save_pngs(profile, tmp_path)
    assert {f.stem for f in files} == {c.key for c in charts(profile)} | {"positions"}
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs Chromium")
def test_a_page_in_a_browser(profile, tmp_path):
    written(profile, tmp_path / "r.html")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    options += ("--virtual-time-budget=20000", "--dump-dom", f"--user-data-dir={tmp_path / 'user'}")
    done = subprocess.run(
        [BROWSER, *options, (tmp_path / "r.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert len(re.findall(r'class="plot\b[^"]*js-plotly-plot', done.stdout)) == len(charts(profile))
    assert len(re.findall(r'<svg class="main-svg"', done.stdout)) >= len(charts(profile))


def test_a_missing_package_is_said(profile, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"plotly is missing: pip install 'bitsparse\[report\]'"):
        save_html(profile, tmp_path / "r.html")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb is missing: pip install 'bitsparse\[wandb\]'"):
        WandbLogger("project")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"missing: pip install 'bitsparse\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)


class Run:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_logger(monkeypatch):
    given, own = Run(), Run()
    logger = WandbLogger(run=given)
    logger(StepMetrics(3, {"density": 0.5}))
    logger.close()
    assert given.logged == [(3, {"density": 0.5})] and not given.finished
    started = []

    def init(**options):
        started.append(options)
        return own

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    logger = WandbLogger("p", name="n")
    logger.close()
    assert started == [{"project": "p", "name": "n"}] and own.finished
    for arguments in ({}, {"project": "p", "run": given}):
        with pytest.raises(TypeError, match="project, run: got"):
            WandbLogger(**arguments)


def test_tensorboard_logger(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    profiled(stack(), steps=3, every=2, on_step=logger)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("density")] == [0, 2]
    assert "saved/feed-forward" in events.Tags()["scalars"]


def command(monkeypatch, *arguments):
    """The exit status; in this process, for speed."""
    from bitsparse.cli.app import run

    monkeypatch.setattr(sys, "argv", ["bitsparse", *map(str, arguments)])
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_the_commands(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    file = tmp_path / "deep" / "p.jsonl"
    options = ("--steps", 4, "--every", 2, "--activation", "reglu", "--output", file)
    assert command(monkeypatch, "profile", *TINY, *options) == 0
    result = load(file)
    assert [row["step"] for row in result.steps] == [0, 2]
    assert result.header["activation"] == "reglu" and result.header["seq_len"] == 16
    assert "saved by kind: " in capsys.readouterr().out
    assert command(monkeypatch, "report", file, "--png", tmp_path / "png") == 0
    assert file.with_suffix(".html").stat().st_size > 1e5
    assert (tmp_path / "png" / "density.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "--steps", "0"), "--steps: got 0, allowed: at least 1"),
        (("profile", "--every", "-1"), "--every: got -1, allowed: at least 1"),
        (("profile", "--memory", "x"), "--memory: got 'x', allowed: compressed"),
        (("profile", "-o", "{folder}"), "which is a folder; allowed: a file"),
        (("report", "{folder}/missing"), "missing: No such file"),
        (
            ("report", "{foreign}"),
            "which does not begin as a profile does; allowed: a file written",
        ),
        (("report", "{good}", "-o", "{good}"), "which is the profile; allowed: another file"),
        (("report", "{good}", "-o", "{foreign}/r.html"), "foreign"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch, capsys, profile):
    foreign, good = tmp_path / "foreign", tmp_path / "good.jsonl"
    foreign.write_text('{"loss": 1}\n')
    profile.save(good)
    places = {"folder": tmp_path, "foreign": foreign, "good": good}
    given = [a.format(**places) for a in arguments]
    extra = TINY if given[0] == "profile" else ()
    assert command(monkeypatch, given[0], *extra, *given[1:]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert load(good) == profile


def test_training_tells_what_is_kept(tmp_path, monkeypatch):
    from bitsparse.training.model import ModelConfig
    from bitsparse.training.train import TrainConfig, train

    model = ModelConfig(layers=2, d_model=32, heads=2, seq_len=16)
    told = {}
    for memory in ("compressed", "dense"):
        told[memory] = []
        config = TrainConfig(
            model, tmp_path / memory, memory=memory, device="cpu", steps=2, batch_size=2,
            eval_batches=0, sample_tokens=0,
        )  # fmt: skip
        try:
            train(config, told[memory].append)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True
    for p in told["compressed"]:
        values = p.scalars()
        assert 0 < values["kept_bytes"] < values["dense_bytes"] == 2 * 32 * 128 * 4
        assert 0 < values["density"] < 1 and values["loss"] == p.loss
    assert not {"kept_bytes", "density"} & told["dense"][0].scalars().keys()
    lines = (tmp_path / "compressed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["density"] for line in lines] == [
        p.values["density"] for p in told["compressed"]
    ]
