"""`bitsparse.profile`: what it finds out, beside plain PyTorch; that it changes nothing."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import bitsparse
from bitsparse.activations import ACTIVATIONS, get_activation
from bitsparse.codings import POLICIES
from bitsparse.profiling import Profile, load
from bitsparse.profiling.measure import unpack_positions
from bitsparse.profiling.saved import RECOMPUTED, Event, Hidden, Level, Owner, at_peak, timeline
from bitsparse.profiling.schedule import Schedule
from helpers import assert_same_bits
from profile_helpers import inputs, profiled, stack


def saved_by_plain_autograd(model, x):
    """Bytes of distinct storages saved for backward, of no parameter: counted independently."""
    skip = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held, found = [], {}

    def pack(t):
        held.append(t.detach())
        storage = t.untyped_storage()
        if storage.data_ptr() not in skip:
            found[storage.data_ptr()] = storage.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).square().mean()
    return sum(found.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("memory", ["dense", "compressed", "checkpoint"])
def test_sizes_are_those_of_the_blocks(activation, memory):
    model = stack(activation, memory=memory)
    result = profiled(model)
    (step,) = result.steps
    assert step["saved_bytes"] == saved_by_plain_autograd(model, inputs())
    dense, compressed = stack(activation, memory="dense"), stack(activation)
    assert step["dense_bytes"] == saved_by_plain_autograd(dense, inputs())
    assert step["compressed_bytes"] == saved_by_plain_autograd(compressed, inputs())
    assert [row["layer"] for row in result.layers] == ["layers.0", "layers.1"]
    for row, block in zip(result.layers, compressed.layers, strict=True):
        assert row["compressed_bytes"] == block.kept.nbytes
        assert row["density"] == block.kept.density
        kept = {"dense": row["dense_bytes"], "compressed": block.kept.nbytes, "checkpoint": 0}
        assert row["hidden_bytes"] == kept[memory]
        assert row["memory"] == memory


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_are_those_of_every_codec(policy):
    row = profiled(stack("reglu", memory="dense")).layers[0]
    block = stack("reglu", codec=policy)
    block(inputs())
    kept = block.layers[0].kept
    assert row[f"bytes_{policy}"] == kept.nbytes
    assert row[f"bits_{policy}"] == 8 * kept.nbytes / kept.numel


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_density_and_its_spread(activation):
    model = stack(activation)
    with torch.no_grad():  # some neurons that no token fires
        first = model.layers[0].gate if activation == "drelu" else model.layers[0].up
        first.weight[:5] = 0
    result = profiled(model)
    row = result.layers[0]
    block, x = model.layers[0], model.norm(inputs())
    gate = F.linear(x, first.weight)
    up = F.linear(x, block.up.weight) if activation == "drelu" else None
    fires = (get_activation(activation).dense(gate, up) != 0).flatten(0, 1)
    assert row["density"] == fires.double().mean().item()
    assert row["silent_neurons"] == int((~fires.any(0)).sum()) >= 5
    for name, dim in (("token", 1), ("neuron", 0)):
        rates = fires.float().mean(dim)
        assert row[f"{name}_density_std"] == pytest.approx(rates.std(correction=0).item(), abs=1e-6)
        assert row[f"{name}_density_min"] == rates.min().item()
        assert row[f"{name}_density_max"] == rates.max().item()
        for q in (10, 50, 90):
            expected = torch.quantile(rates, q / 100).item()
            assert row[f"{name}_density_p{q}"] == pytest.approx(expected, abs=1e-6)
    positions = next(r for r in result.positions if r["layer"] == "layers.0")
    assert (unpack_positions(positions) == fires.numpy()).all()
    counted = {r["exponent"]: r["count"] for r in result.exponents if r["layer"] == "layers.0"}
    exponents = torch.frexp(gate.flatten(0, 1)[fires])[1] - 1  # frexp: mantissas below 1
    expected = dict(zip(*(t.tolist() for t in exponents.unique(return_counts=True)), strict=True))
    assert counted == expected


def grads(model, x, watched):
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    if watched:
        with bitsparse.profile(model):
            out = model(x)
            out.square().mean().backward()
    else:
        out = model(x)
        out.square().mean().backward()
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found, torch.rand(1)


@pytest.mark.parametrize("kind", ["compressed", "dense", "checkpoint", "converted", "dropout"])
def test_watching_changes_no_bit(kind):
    if kind in ("converted", "dropout"):
        p = 0.1 if kind == "dropout" else 0.0
        model = nn.TransformerEncoderLayer(16, 2, 48, dropout=p, batch_first=True)
        bitsparse.convert(model)
    else:
        model = stack("reglu", memory=kind)
    plain, plain_random = grads(model, inputs(), False)
    watched, watched_random = grads(model, inputs(), True)
    for a, b in zip(watched, plain, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(watched_random, plain_random)  # no random number used up


def test_nothing_is_left_behind():
    model = stack()
    before = {id(m): dict(m.__dict__) for m in model.modules()}
    result = profiled(model, steps=2)
    assert len(result.steps) == 2
    assert torch._C._len_torch_function_stack() == 0
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert module.__dict__.keys() == before[id(module)].keys()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models_that_are_converted_or_could_be(dropout):
    model = nn.Sequential(
        nn.TransformerEncoderLayer(16, 2, 48, dropout=dropout, batch_first=True),
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16)),
    )
    dense = profiled(model)
    assert [row["layer"] for row in dense.layers] == ["0", "1[0:3]"]
    for row in dense.layers:
        assert row["memory"] == "dense" and row["hidden_bytes"] == row["dense_bytes"]
    assert dense.steps[0]["saved_bytes"] == dense.steps[0]["dense_bytes"]
    bitsparse.convert(model)
    converted = profiled(model)
    for row, other in zip(converted.layers, dense.layers, strict=True):
        assert row["memory"] == "compressed" and row["hidden_bytes"] == row["compressed_bytes"]
        assert row["dense_bytes"] == other["dense_bytes"]
    if not dropout:
        assert converted.steps[0]["saved_bytes"] == dense.steps[0]["compressed_bytes"]
    kinds = {row["name"]: row["kind"] for row in dense.memory}
    assert kinds["0.self_attn"] == "attention" and kinds["0.norm1"] == "normalization"
    assert kinds["1[0:3]"] == "feed-forward" and kinds["1.3"] == "normalization"


@pytest.mark.parametrize("hidden_act", ["relu", "gated"])
def test_models_of_transformers(hidden_act):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    if hidden_act == "relu":
        config = transformers.OPTConfig(
            **sizes, ffn_dim=48, num_attention_heads=2, word_embed_proj_dim=16, dropout=0.0
        )
        model, names = transformers.OPTForCausalLM(config), "model.decoder.layers.{}"
    else:
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=48, num_attention_heads=2, hidden_act="relu"
        )
        model, names = transformers.LlamaForCausalLM(config), "model.layers.{}.mlp"
    tokens = torch.randint(0, 20, (2, 12))
    for memory in ("dense", "compressed"):
        if memory == "compressed":
            bitsparse.convert(model)
        with bitsparse.profile(model.train(), timed=False) as p:
            model(tokens, labels=tokens).loss.backward()
        assert [row["layer"] for row in p.result.layers] == [names.format(i) for i in range(2)]
        for row in p.result.layers:
            assert row["memory"] == memory and row["hidden_bytes"] == row[f"{memory}_bytes"]


def test_autocast():
    model = stack("relu2", memory="dense")
    with bitsparse.profile(model, timed=False) as p, torch.autocast("cpu", torch.bfloat16):
        model(inputs()).square().mean().backward()
    for row in p.result.layers:
        assert row["dtype"] == "bfloat16"
        assert row["hidden_bytes"] == row["dense_bytes"] == 2 * 2 * row["tokens"] * row["neurons"]


def test_every_forward_pass_of_a_step_counts_and_evaluation_does_not():
    model = stack()
    with bitsparse.profile(model, timed=False) as p:
        for seed in range(2):  # gradient accumulation
            model(inputs(seed)).square().mean().backward()
        with torch.no_grad():
            model(inputs())
    assert [(r["layer"], r["call"]) for r in p.result.layers] == [
        ("layers.0", 0), ("layers.1", 0), ("layers.0", 1), ("layers.1", 1),
    ]  # fmt: skip
    # The second pass begins after the first one's activations are gone.
    assert p.result.steps[0]["saved_bytes"] < 1.5 * saved_by_plain_autograd(model, inputs())


def test_chunks():
    model = stack("reglu", tokens_per_chunk=32)
    row = profiled(model).layers[0]
    whole = profiled(stack("reglu")).layers[0]
    for name in ("density", "dense_bytes", "compressed_bytes", "silent_neurons"):
        assert row[name] == whole[name]
    model(inputs())
    assert row["hidden_bytes"] == model.layers[0].kept.nbytes


def test_recomputed_layers_are_seen_once():
    model = stack(memory="dense")
    with bitsparse.profile(model, timed=False) as p:
        out = torch.utils.checkpoint.checkpoint(model, inputs(), use_reentrant=False)
        out.square().mean().backward()
    assert [(r["layer"], r["call"]) for r in p.result.layers] == [
        ("layers.0", 0), ("layers.1", 0),
    ]  # fmt: skip


def test_times_are_there_when_asked_for():
    names = {"activation_seconds", "compress_seconds", "decompress_seconds"}
    row = profiled(stack(), timed=True).layers[0]
    assert names <= row.keys() and all(row[name] > 0 for name in names)
    assert not names & profiled(stack(), timed=False).layers[0].keys()


def test_steps_that_are_looked_at():
    told = []
    result = profiled(stack(), steps=5, every=2, on_step=told.append)
    assert [row["step"] for row in result.steps] == [0, 2, 4] == [m.step for m in told]
    assert {row["step"] for row in result.layers} == {0, 2, 4}
    for table in (
        result.timeline,
        result.exponents,
        result.positions,
    ):  # large: the first, the last
        assert {row["step"] for row in table} == {0, 4}
    scalars = told[-1].scalars()
    assert scalars["density"] == result.steps[-1]["density"]
    assert scalars["density/layers.1"] == result.layers[-1]["density"]
    assert scalars["saved/feed-forward"] == result.steps[-1]["feed_forward_bytes"]


def follow(schedule, steps, plain, extra):
    chosen = []
    for step in range(steps):
        wanted = schedule.wants()
        if wanted:
            chosen.append(step)
        schedule.note(wanted, plain + (extra if wanted else 0.0))
    return chosen


@pytest.mark.parametrize("extra", [0.5, 5.0, 40.0])
def test_the_overhead_stays_below_the_limit(extra):
    schedule = Schedule(None, 0.05)
    chosen = follow(schedule, 5000, 1.0, extra)
    assert chosen[0] == 0 and len(chosen) >= 5
    assert schedule.overhead() == pytest.approx(extra * (len(chosen) - 1) / 4999, rel=1e-6)
    # The second look may have cost more than was expected; the following ones make up for it.
    assert schedule.overhead() <= 0.05
    assert schedule.overhead() > 0.05 / 2


def test_every_nth_step():
    schedule = Schedule(3, 0.05)
    assert follow(schedule, 10, 1.0, 100.0) == [0, 3, 6, 9]
    assert Schedule(1, 0.05).overhead() is None


def test_memory_at_its_peak():
    a, b = Owner("a", "attention"), Owner("b", "other")
    events = [Event(a, 10), Event(b, 5), Event(b, -5), Event(a, 3), Event(a, -10), Event(a, -3)]
    assert at_peak(events) == (15, {("a", "attention"): 10, ("b", "other"): 5})
    assert at_peak([]) == (0, {})


def test_the_timeline_with_other_blocks():
    rest, block = Owner("x", "other"), Owner("ffn", "feed-forward", 1, True)
    again = Owner("", RECOMPUTED)
    events = [Event(rest, 8), Event(block, 4), Event(block, 2), Event(again, 1), Event(again, -1)]
    events += [Event(block, -4), Event(block, -2), Event(rest, -8)]
    assert timeline(events, {1: Hidden(100, 6)}) == [
        Level(8, 8, 8), Level(12, 8, 8), Level(14, 108, 14), Level(15, 108, 15), Level(14, 108, 14),
        Level(10, 8, 8), Level(8, 8, 8), Level(0, 0, 0),
    ]  # fmt: skip
    unknown = [Event(block._replace(visit=7), 4)]
    assert timeline(unknown, {}) == [Level(4, 4, 4)]


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_step_inside_of_another_mode():
    model = stack()
    with pytest.raises(RuntimeError, match=r"step.. was called inside of a context"):
        with bitsparse.profile(model, every=1) as p:
            with Other():
                p.step()
    assert torch._C._len_torch_function_stack() == 0
    assert not model.norm._forward_hooks
    with pytest.raises(RuntimeError, match="outside of `with"):
        p.step()


def test_results_survive_an_exception(tmp_path):
    model, path = stack(), tmp_path / "p.jsonl"
    with pytest.raises(KeyError):
        with bitsparse.profile(model, every=1, timed=False, path=path) as p:
            model(inputs()).square().mean().backward()
            p.step()
            model(inputs())
            raise KeyError
    assert [row["step"] for row in load(path).steps] == [0]


def test_blocks_that_never_ran(tmp_path):
    path = tmp_path / "p.jsonl"
    with pytest.warns(UserWarning, match=r"no forward pass .* was seen \(2 in the model\)"):
        with bitsparse.profile(stack(), path=path):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": nn.Linear(2, 2)}, ValueError, "model: got Linear without a feed-forward block"),
        (
            {"model": nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))},
            ValueError,
            r"\[0:3\]: 1 is GELU, not ReLU",
        ),
        ({"model": stack(precision="fp8")}, ValueError, "products in FP8 are not watched"),
        ({"model": "x"}, TypeError, "model: got str, allowed: torch.nn.Module"),
        ({"every": 0}, ValueError, "every: got 0, allowed: None, a positive integer"),
        ({"every": True}, ValueError, "every: got True"),
        ({"max_overhead": 0}, ValueError, "max_overhead: got 0, allowed: a positive number"),
        ({"codec": "best"}, ValueError, "codec: got 'best', allowed: 'fast'"),
        ({"on_step": 3}, TypeError, "on_step: got 3, allowed: None, a callable"),
    ],
)
def test_bad_arguments(change, error, message):
    model = change.pop("model", None) or stack()
    with pytest.raises(error, match=message):
        bitsparse.profile(model, **change)


def test_modules_that_are_nearly_blocks_are_listed():
    model = stack()
    model.layers[1].up = nn.Sequential(model.layers[1].up)
    result = profiled(model)
    assert [row["layer"] for row in result.layers] == ["layers.0"]
    assert result.skipped == [{"layer": "layers.1", "reason": "up is Sequential, not nn.Linear"}]


def test_files_come_back_as_they_were(tmp_path):
    path = tmp_path / "p.jsonl"
    result = profiled(stack(), steps=3, path=path, timed=True)
    assert load(path) == result
    assert load(str(path)).header["model"] == "Stack"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["format"] == "bitsparse-profile" and lines[0]["record"] == "header"
    assert len([line for line in lines if line["record"] == "layers"]) == len(result.layers)


def damaged(text: str) -> dict[str, str | bytes]:
    lines = text.splitlines(keepends=True)
    layer = next(i for i, line in enumerate(lines) if '"layers"' in line)
    row = json.loads(lines[layer])

    def with_layer(**changes: object) -> str:
        changed = json.dumps({k: v for k, v in {**row, **changes}.items() if v is not None}) + "\n"
        return "".join([*lines[:layer], changed, *lines[layer + 1 :]])

    return {
        "does not begin as a profile does": "step,loss\n1,2\n",
        "does not begin as a profile": "",
        "not begin as a profile does": '{"step": 1, "loss": 2.0}\n',
        "which is no text": b"\x89PNG\xff\xfe",
        "of version 99, allowed: version 1": text.replace('"version": 1', '"version": 99', 1),
        "ends within line": text[:-20],
        f"line {layer + 1}: not a JSON object": "".join([*lines[:layer], "[1]\n", *lines[layer:]]),
        f"line {layer + 1}: density is None": with_layer(density=None),
        f"line {layer + 1}: density is nan": with_layer(density=float("nan")),
        f"line {layer + 1}: tokens is 'many'": with_layer(tokens="many"),
        f"line {layer + 1}: record is 'nothing'": with_layer(record="nothing"),
        "whose layers are of step 77": with_layer(step=77),
        "which has no steps": lines[0],
    }


@pytest.mark.parametrize("index", range(13))
def test_damaged_and_foreign_files(tmp_path, index):
    path = tmp_path / "p.jsonl"
    profiled(stack(), path=path)
    message, content = list(damaged(path.read_text()).items())[index]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        load(path)
    assert message in str(caught.value) and "allowed: " in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
    with pytest.raises(OSError):
        Profile().save(tmp_path)
