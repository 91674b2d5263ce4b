"""The predicted peaks: against measured ones, and part by part."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bitsparse
from bitsparse import backends, codings, layout
from bitsparse.activations import ACTIVATIONS, get_activation
from bitsparse.bench.inputs import PRE_ACTIVATIONS
from bitsparse.ops import block as ops_block
from bitsparse.planning import backend as planning_backend
from bitsparse.planning import tracker as kinds
from bitsparse.planning.gpu import GpuMode
from bitsparse.planning.models import MODES, from_transformers, own
from bitsparse.planning.plan import (
    ModePlan,
    PlanConfig,
    largest_batch,
    make_plan,
    on_several,
    read_densities,
    recommend,
)
from bitsparse.planning.step import CUBLAS_WORKSPACES, StepPeak, StepSettings, predict_step
from bitsparse.planning.tracker import Tracker
from bitsparse.training.errors import UserError
from bitsparse.training.model import PRESETS, ModelConfig, Transformer

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SMALL = ModelConfig(layers=2, d_model=128, heads=2, seq_len=128)
SETTINGS = StepSettings(4, 128, "bfloat16", "float32", "adamw", (0.1,), "correlated")


def small(**changes):
    return own(replace(SMALL, **changes), "small", "balanced", None)


def predict(mode, source=None, **changes):
    return predict_step(source or small(), mode, replace(SETTINGS, **changes))


# ------------------------------------------------------------------- against measurements


@pytest.mark.parametrize(
    ("activation", "mode"), [("relu2", "dense"), ("reglu", "checkpoint"), ("reglu", "compressed")]
)
def test_peaks_are_those_measured_on_an_h200(activation, mode):
    """The file's peaks leave out what PyTorch held before the step besides model and optimizer: the
    batch and the workspaces of cuBLAS."""
    result = json.loads((RESULTS / "h200-model.json").read_text())
    batch = result["config"]["batch_size"]
    (case,) = (c for c in result["cases"] if c["activation"] == activation)
    (measured,) = (m for m in case["modes"] if m["mode"] == mode)
    source = own(replace(PRESETS["gpt2"].model, activation=activation), "", "balanced", None)
    densities = tuple(measured["density"]) or (0.1,)
    settings = replace(SETTINGS, batch_size=batch, seq_len=1024, densities=densities)
    peak = predict_step(source, mode, settings).nbytes
    peak -= CUBLAS_WORKSPACES + 2 * 8 * batch * 1024
    assert peak == pytest.approx(measured["peak_bytes"], rel=0.005)


def test_models_are_told_of_autocast_as_on_a_gpu(monkeypatch):
    """Some ask without a device, which is that of CUDA, and round or not by the answer."""
    seen = []
    forward = Transformer.forward

    def recording(self, *arguments, **options):
        seen.append((torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", recording)
    before = torch.get_autocast_dtype("cuda")
    predict("dense")
    assert seen == [(True, torch.bfloat16)]
    predict("dense", dtype="float32")
    assert not seen[1][0]
    assert (torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")) == (False, before)


# ---------------------------------------------------------------------------- the tracker


def test_tracker_counts_what_is_held_at_once():
    tracker = Tracker({})
    with FakeTensorMode(), tracker:
        a = torch.empty(1000, dtype=torch.float32)  # 4,000 bytes: 8 blocks
        b = a.view(10, 100)  # no memory
        c = a + 1
        del a, b
        d = torch.empty(1, dtype=torch.uint8)  # one block
        assert tracker.level == 4096 + 512
        del c
        e = torch.empty(0)
        assert tracker.level == 512
        del d, e
    assert tracker.level == 0
    assert tracker.peak == 2 * 4096


def test_tracker_tells_what_operations_are_for_in_backward_too():
    class Norm(nn.Module):
        def forward(self, x):
            return x * x

    norm, linear = Norm(), nn.Linear(256, 256, bias=False)
    model = nn.Sequential(linear, norm)
    tracker = Tracker({norm: kinds.NORMS})
    with FakeTensorMode():
        linear.weight = nn.Parameter(torch.empty(256, 256))
        tracker.watch(model)
        x = torch.empty(512, 256)
        with tracker:
            out = model(x)
            assert tracker.at_peak[kinds.NORMS, False] == 512 * 256 * 4  # its result
            tracker.backward = True
            out.sum().backward()
        tracker.see_peak()
    held = tracker._held
    assert held[kinds.GRADIENTS, True] == 256 * 256 * 4
    assert held[kinds.PARAMETERS, False] == 256 * 256 * 4
    assert tracker.at_peak[kinds.NORMS, True] > 0
    tracker.close()
    assert not norm._forward_hooks and not norm._forward_pre_hooks


def test_the_sum_of_two_gradients_takes_no_third_tensor():
    tracker = Tracker({})
    nbytes = 4 * 2**20
    with FakeTensorMode(), tracker:
        x = torch.empty(2**20, requires_grad=True)
        y = x * 2
        out = (y * 3) + (y * 5)
        del y
        tracker.backward = True
        tracker.peak = 0
        out.backward(torch.empty(2**20))
    # x, out, its gradient and, of y, two gradients.
    assert tracker.peak == 5 * nbytes


# -------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("codec", codings.POLICIES)
def test_planned_blocks_keep_what_real_ones_do(activation, codec):
    act = get_activation(activation)
    shape, dtype, density = (512, 256), torch.bfloat16, 0.15
    draw = PRE_ACTIVATIONS["correlated"]
    fires = density**0.5 if act.relu_up else density
    gate = draw(shape, fires, torch.device("cpu"), dtype, 7)
    up = draw(shape, fires if act.relu_up else 0.5, torch.device("cpu"), dtype, 9)
    up = up if act.gated else None
    reference = backends.get_backend("reference")

    def kept(backend, gate, up):
        geometry = layout.geometry(shape)
        _, survey = backend.activate(
            geometry, act, gate, up, False, codings.needs_statistics(codec)
        )
        counts = survey.counts(survey.totals.tolist())
        return codings.choose(counts, codec).nbytes, counts.nnz / geometry.numel

    real, real_density = kept(reference, gate.clone(), up)
    planned = planning_backend.PlanningBackend("correlated")
    planned.density = real_density
    planning_backend.prepare(activation, real_density, "correlated", dtype)
    with FakeTensorMode():
        fake = torch.empty(shape, dtype=dtype)
        nbytes, planned_density = kept(planned, fake, torch.empty_like(fake) if act.gated else None)
    assert planned_density == pytest.approx(real_density, rel=1e-3)
    assert nbytes == pytest.approx(real, rel=0.06)


def test_compressed_keeps_less_the_sparser_it_is():
    peaks = [predict("compressed", densities=(d,)).nbytes for d in (0.0, 0.02, 0.3, 1.0)]
    assert peaks == sorted(set(peaks))


def test_a_density_for_each_layer():
    def peak(*densities):
        return predict("compressed", densities=densities, batch_size=64).nbytes

    assert peak(0.02) < peak(0.02, 0.4) < peak(0.4)
    with pytest.raises(UserError, match="--density: got 3 numbers, allowed: 1, or 2"):
        predict("compressed", densities=(0.1, 0.2, 0.3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_mode_can_be_planned(activation):
    source = small(activation=activation)
    peaks = {mode: predict(mode, source, batch_size=32).nbytes for mode in MODES}
    assert peaks["compressed"] < peaks["dense"]
    assert peaks["checkpoint"] < peaks["dense"]


@pytest.mark.parametrize(("dtype", "param_dtype"), [("float32", "float32"), ("float16", "float16")])
def test_precisions(dtype, param_dtype):
    size = 4 if param_dtype == "float32" else 2
    peak = predict("compressed", dtype=dtype, param_dtype=param_dtype)
    assert peak.parameter_bytes == size * sum(
        p.numel() for p in small().build().module.parameters()
    )
    assert kinds.CASTS not in peak.by_kind


def test_the_parts_add_up_and_state_is_exact():
    peak = predict("dense")
    assert sum(map(sum, peak.by_kind.values())) == peak.nbytes
    assert peak.by_kind[kinds.OPTIMIZER][0] == 2 * peak.parameter_bytes
    assert kinds.OTHER not in peak.by_kind
    assert predict("dense", optimizer="none").by_kind.get(kinds.OPTIMIZER) is None


def test_planning_leaves_the_library_as_it_was():
    before = backends._default_backend, ops_block.is_watched, bitsparse.memory_stats()
    predict("compressed")
    with pytest.raises(UserError):
        predict("compressed", densities=(0.1,) * 5)
    assert (backends._default_backend, ops_block.is_watched, bitsparse.memory_stats()) == before
    block = bitsparse.nn.FeedForward(64, 128)
    with backends.force_backend("reference"):
        block(torch.randn(64, 64)).sum().backward()
    assert block.kept is not None


# ------------------------------------------------------------------------- GPU stand-ins


def test_gpu_mode_squares_in_float32_under_autocast():
    x = torch.randn(8, dtype=torch.bfloat16)
    with GpuMode(False, lambda nbytes: None):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.square(x).dtype == torch.float32
            assert (x @ x.view(8, 1)).dtype == torch.bfloat16
        assert torch.square(x).dtype == torch.bfloat16


def test_gpu_mode_attention_keeps_tokens_not_squares_of_them():
    tracker = Tracker({})
    with FakeTensorMode(), GpuMode(False, tracker.workspace), tracker:
        q, k, v = (
            torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        before = tracker.level
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert out.shape == q.shape
        # The result, and one float32 a head and token.
        assert tracker.level - before == q.nbytes + 4 * 2 * 4 * 256
        out.sum().backward()
        assert q.grad.shape == q.shape


# ---------------------------------------------------------------------- models by config

transformers = pytest.importorskip("transformers")

NEMOTRON = {
    "model_type": "nemotron",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "relu2",
}


def write(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_of_transformers(tmp_path):
    source = from_transformers(write(tmp_path, **NEMOTRON), "balanced", None, None)
    assert source.modes == ("dense", "checkpoint", "compressed") and source.seq_len == 256
    peaks = {}
    for mode in source.modes:
        peaks[mode] = predict(mode, source, batch_size=16, seq_len=256)
    assert peaks["compressed"].nbytes < peaks["dense"].nbytes
    assert peaks["checkpoint"].nbytes < peaks["dense"].nbytes
    feed_forward = {
        m: sum(p.by_kind[kinds.FEED_FORWARD]) for m, p in peaks.items() if m != "checkpoint"
    }
    assert feed_forward["compressed"] < feed_forward["dense"] / 2
    assert peaks["dense"].by_kind[kinds.ATTENTION][0] > 0
    assert kinds.LOSS in peaks["dense"].by_kind


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_that_calls_its_block_inline(tmp_path, dropout):
    config = {
        "model_type": "opt",
        "vocab_size": 512,
        "hidden_size": 128,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 128,
        "dropout": dropout,
        "activation_function": "relu",
    }
    source = from_transformers(write(tmp_path, **config), "balanced", None, None)
    dense, compressed = (
        predict(mode, source, batch_size=16, seq_len=256) for mode in ("dense", "compressed")
    )
    tokens = 16 * 256
    # Of two layers, at least the dense hidden tensor in bfloat16 against an eighth of that.
    assert dense.nbytes - compressed.nbytes > 1.5 * tokens * 512 * 2
    assert sum(compressed.by_kind[kinds.FEED_FORWARD]) > 0


def test_a_model_without_blocks_to_compress(tmp_path):
    config = {**NEMOTRON, "model_type": "llama", "hidden_act": "silu"}
    source = from_transformers(write(tmp_path, **config), "balanced", None, None)
    assert source.modes == ("dense", "checkpoint")
    assert "no feed-forward block" in source.note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ("[]", "holds no JSON object"),
        ("{}", "got model_type 'None'"),
        ('{"model_type": "perpetuum"}', "got model_type 'perpetuum'"),
        ('{"model_type": "clip"}', "has no causal language model"),
        (json.dumps({**NEMOTRON, "hidden_size": "wide"}), "no model can be made from"),
        (json.dumps({**NEMOTRON, "hidden_act": "perpetuum"}), "no model can be made from"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with warnings.catch_warnings(), pytest.raises(UserError, match=message):
        warnings.simplefilter("ignore")
        from_transformers(tmp_path, "balanced", None, None)


def test_a_configuration_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"--config: .*No such file"):
        from_transformers(tmp_path, "balanced", None, None)


# -------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize("limit", [0, 99, 100, 1234, 50_000, 10**9])
@pytest.mark.parametrize("bend", [0, 300])
def test_largest_batch_is_the_largest(start, limit, bend):
    def peak(size):  # convex: another moment becomes the peak
        assert 1 <= size <= 512
        return max(100 + 37 * size, 60 * size + bend - 1000)

    fitting = [s for s in range(1, 513) if peak(s) <= limit]
    assert largest_batch(peak, limit, start, 512) == max(fitting, default=0)


def plan_of(mode, fits, largest, peak=1):
    return ModePlan(mode, peak, {}, fits, largest)


def test_recommendation():
    config = PlanConfig(memory_gb=10, batch_size=4)
    everything = [plan_of("dense", True, 9), plan_of("compressed", True, 20)]
    assert recommend(everything, config)[0] == "dense"
    some = [
        plan_of("dense", False, 1),
        plan_of("checkpoint", True, 9),
        plan_of("compressed", True, 6),
    ]
    mode, why = recommend(some, config)
    assert mode == "compressed" and "dense does not fit into 10 GiB" in why
    mode, why = recommend([plan_of("dense", False, 1), plan_of("compressed", False, 3)], config)
    assert mode == "compressed" and "3 does" in why
    assert recommend([plan_of("dense", False, 0)], config)[0] is None
    assert (
        recommend([plan_of("dense", None, None, 5), plan_of("x", None, None, 4)], PlanConfig())[0]
        == "x"
    )


def test_several_gpus():
    held = {
        kinds.PARAMETERS: (1000, 0),
        kinds.OPTIMIZER: (2000, 0),
        kinds.GRADIENTS: (0, 400),
        kinds.ATTENTION: (70, 0),
    }
    one = StepPeak(3470, held, 1000, 100, 50)
    assert on_several(one, 1, "fsdp") is one
    assert on_several(one, 4, "ddp").nbytes == 3470 + 1000
    assert on_several(one, 4, "fsdp").nbytes == 250 + 500 + 100 + 70 + 50 + 4 * 100


def test_a_whole_plan():
    plan = make_plan(small(), PlanConfig(batch_size=16, memory_gb=1, modes=("dense", "compressed")))
    dense, compressed = plan.modes
    assert dense.fits and compressed.peak_bytes < dense.peak_bytes
    assert 16 < dense.largest_batch < compressed.largest_batch
    for mode in plan.modes:
        settings = replace(SETTINGS, batch_size=mode.largest_batch)
        assert predict_step(small(), mode.mode, settings).nbytes <= plan.limit_bytes
        settings = replace(settings, batch_size=mode.largest_batch + 1)
        assert predict_step(small(), mode.mode, settings).nbytes > plan.limit_bytes
    assert plan.recommended == "dense"
    json.dumps(plan.as_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": -1}, "--batch-size: got -1, allowed: at least 1"),
        ({"batch_size": 2**23}, "--batch-size: got"),
        ({"seq_len": 0}, "--seq-len: got 0"),
        ({"densities": (1.5,)}, "--density: got 1.5, allowed: from 0 to 1"),
        ({"densities": (float("nan"),)}, "--density: got nan"),
        ({"densities": ()}, "--density: got none"),
        ({"dtype": "int8"}, "--dtype: got 'int8'"),
        ({"dtype": "float16", "param_dtype": "bfloat16"}, "--param-dtype: got bfloat16"),
        ({"optimizer": "lion"}, "--optimizer: got 'lion'"),
        ({"positions": "here"}, "--positions: got 'here'"),
        ({"modes": ("dense", "other")}, "--modes: got 'other'"),
        ({"memory_gb": 0.5}, "--memory-gb: got 0.5"),
        ({"memory_gb": float("nan")}, "--memory-gb: got nan"),
        ({"gpus": 0}, "--gpus: got 0"),
        ({"sharding": "zero"}, "--sharding: got 'zero'"),
    ],
)
def test_values_that_are_not_allowed(changes, message):
    with pytest.raises(UserError, match=message):
        make_plan(small(), PlanConfig(**changes))


def test_densities_from_text_and_files(tmp_path):
    assert read_densities("0.25") == (0.25,)
    assert read_densities("0.1,0.2") == (0.1, 0.2)
    other = tmp_path / "other"
    other.write_text("no profile\n")
    for text, message in (
        ("1.5", "got 1.5"),
        (str(tmp_path / "missing"), "allowed: a number"),
        (str(other), "--density: path: got"),
    ):
        with pytest.raises(UserError, match=message):
            read_densities(text)
