"""Converting models of transformers: tiny random ones, made from their configurations."""

import copy
import importlib
import io
import pickle

import pytest
import torch
from torch import nn

import bitsparse
from bitsparse.conversion.block import Pending
from bitsparse.conversion.families import FAMILIES
from convert_helpers import Adapter, Step, assert_same_step, live_tensors, step_of

transformers = pytest.importorskip("transformers", reason="needs transformers")

TEXT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "activation_function": "relu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2,
}
OPT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
GATED_T5 = {**T5, "feed_forward_proj": "gated-relu"}
CAUSAL, SEQ2SEQ = "ForCausalLM", "ForConditionalGeneration"

MODELS = {
    "nemotron": ("Nemotron", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "arcee": ("Arcee", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "jais2": ("Jais2", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "persimmon": ("Persimmon", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "gpt_neox": ("GPTNeoX", CAUSAL, {**TEXT, "hidden_act": "relu"}, "relu"),
    "nanochat": ("NanoChat", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "phi": ("Phi", CAUSAL, {**TEXT, "hidden_act": "relu"}, "relu"),
    "t5": ("T5", SEQ2SEQ, {**T5, "feed_forward_proj": "relu"}, "relu"),
    "t5 gated": ("T5", SEQ2SEQ, GATED_T5, "reglu"),
    "mt5": ("MT5", SEQ2SEQ, {**T5, "feed_forward_proj": "relu"}, "relu"),
    "mt5 gated": ("MT5", SEQ2SEQ, GATED_T5, "reglu"),
    "umt5": ("UMT5", SEQ2SEQ, {**T5, "feed_forward_proj": "relu"}, "relu"),
    "umt5 gated": ("UMT5", SEQ2SEQ, GATED_T5, "reglu"),
    "longt5": ("LongT5", SEQ2SEQ, {**T5, "feed_forward_proj": "relu"}, "relu"),
    "longt5 gated": ("LongT5", SEQ2SEQ, GATED_T5, "reglu"),
    "switch": (
        "SwitchTransformers",
        SEQ2SEQ,
        {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        "relu",
    ),
    "llama": ("Llama", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "llama relu2": ("Llama", CAUSAL, {**TEXT, "hidden_act": "relu2", "mlp_bias": True}, "reglu2"),
    "mistral": ("Mistral", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "qwen2": ("Qwen2", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "qwen3": ("Qwen3", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "reglu2"),
    "gemma": ("Gemma", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "gemma2": ("Gemma2", CAUSAL, {**TEXT, "hidden_activation": "relu"}, "reglu"),
    "olmo2": ("Olmo2", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "opt": ("OPT", CAUSAL, OPT, "relu"),
    "opt, norm after": ("OPT", CAUSAL, {**OPT, "do_layer_norm_before": False}, "relu"),
    "m2m_100": ("M2M100", SEQ2SEQ, BART, "relu"),
    "nllb_moe": (
        "NllbMoe",
        SEQ2SEQ,
        {**BART, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        "relu",
    ),
    "bart": ("Bart", SEQ2SEQ, BART, "relu"),
    "mbart": ("MBart", SEQ2SEQ, BART, "relu"),
    "pegasus": ("Pegasus", SEQ2SEQ, BART, "relu"),
    "marian": ("Marian", "MTModel", {**BART, "pad_token_id": 0}, "relu"),
}
MAIN = ["nemotron", "llama", "t5 gated", "opt", "m2m_100"]


def make(name: str, **changes: object) -> nn.Module:
    family, suffix, config, _ = MODELS[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**{**config, **changes})
    return getattr(transformers, family + suffix)(made).train()


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module) -> Step:
    def forward():
        result = model(input_ids=ids(), labels=ids(1), use_cache=False)
        return result.logits, result.loss

    return step_of(model, forward)


@pytest.mark.parametrize("name", MODELS)
def test_same_bits_and_compressed(name):
    model = make(name)
    before = step(model)
    report = bitsparse.convert(model, strict=True)
    assert {c.activation for c in report.converted} == {MODELS[name][3]}
    assert not report.skipped
    after = step(model)
    # Experts that are given one token, or none, keep nothing compressed.
    fewest = 1 if name in ("switch", "nllb_moe") else len(report.converted)
    assert fewest <= after.live <= len(report.converted)
    assert_same_step(after, before)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name):
    if name == "switch" and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("Switch Transformers of this version does not run under autocast")
    model = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        before = step(model)
    bitsparse.convert(model)
    with torch.autocast("cpu", torch.bfloat16):  # anew: it remembers what it cast
        after = step(model)
    assert after.live > 0
    assert_same_step(after, before)


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16(name):
    model = make(name).to(torch.bfloat16)
    before = step(model)
    bitsparse.convert(model)
    after = step(model)
    assert after.live > 0
    assert_same_step(after, before)


def test_fuyu():
    text = {"model_type": "persimmon", **TEXT, "hidden_act": "relu2"}
    config = transformers.FuyuConfig(**TEXT, text_config=text, patch_size=4)
    torch.manual_seed(0)
    model = transformers.FuyuForCausalLM(config)
    before = step(model)
    assert len(bitsparse.convert(model).converted) == 2
    after = step(model)
    assert after.live == 2
    assert_same_step(after, before)


@pytest.mark.parametrize("name", ["t5", "t5 gated"])
@pytest.mark.parametrize("autocast", [False, True])
def test_t5_with_wo_in_float32(name, autocast):
    model = make(name).to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = step(model)
    bitsparse.convert(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = step(model)
    assert (after.live > 0) == autocast  # without, the hidden tensor is cast
    assert_same_step(after, before)


@pytest.mark.parametrize("name", MAIN)
def test_generate(name):
    model = make(name).eval()
    kwargs = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    before = model.generate(ids(), **kwargs)
    bitsparse.convert(model)
    assert torch.equal(model.generate(ids(), **kwargs), before)
    assert live_tensors() == 0


@pytest.mark.parametrize("name", MAIN)
def test_saving_and_loading(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "before")
    bitsparse.convert(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (sorted((tmp_path / d).iterdir()) for d in ("before", "after"))
    assert [f.name for f in before] == [f.name for f in after]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(after, before, strict=True))
    loaded = type(model).from_pretrained(tmp_path / "after").train()
    assert bitsparse.revert(loaded) == 0
    expected = step(loaded)
    assert_same_step(step(model), expected)
    bitsparse.convert(loaded)
    assert_same_step(step(loaded), expected)


@pytest.mark.parametrize("name", MAIN)
def test_copies(name):
    model = make(name)
    bitsparse.convert(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False), pickled):
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.1)
        after = step(other)
        assert after.live > 0
        assert all(p.grad is None for p in model.parameters())
        assert bitsparse.revert(other) > 0
        assert_same_step(after, step(other))


@pytest.mark.parametrize("name", MAIN)
def test_revert(name):
    model = make(name)
    dicts = {n: dict(m.__dict__) for n, m in model.named_modules()}
    report = bitsparse.convert(model)
    assert bitsparse.convert(model).already == report.converted
    assert bitsparse.revert(model) == len(report.converted)
    for n, m in model.named_modules():
        assert list(m.__dict__) == list(dicts[n])
        assert all(m.__dict__[k] is v for k, v in dicts[n].items())
    assert step(model).live == 0


def blocks(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Every module that has a feed-forward block, with the names of the fused children."""
    known = {c: f for f in FAMILIES for c in f.classes}
    found = []
    for m in model.modules():
        family = known.get(f"{type(m).__module__}.{type(m).__qualname__}")
        if family is not None:
            names = [family.up, family.gate, family.act, family.dropout, family.down]
            found.append((m, [n for n in names if n is not None]))
    return found


@pytest.mark.parametrize("name", MAIN)
def test_adapters_and_hooks(name):
    model = make(name)
    count = len(bitsparse.convert(model).converted)
    block, children = blocks(model)[0]
    for child in children:
        called: list[bool] = []
        handle = getattr(block, child).register_forward_hook(lambda *_, c=called: c.append(True))
        after = step(model)
        assert called
        assert after.live == count - 1
        handle.remove()
        plain = copy.deepcopy(model)
        bitsparse.revert(plain)
        assert_same_step(after, step(plain))
        if isinstance(getattr(block, child), nn.Linear):
            base = getattr(block, child)
            torch.manual_seed(1)
            setattr(block, child, Adapter(base))
            after = step(model)
            assert after.live == count - 1
            plain = copy.deepcopy(model)
            bitsparse.revert(plain)
            assert_same_step(after, step(plain))
            setattr(block, child, base)
    assert step(model).live == count


@pytest.mark.parametrize(
    ("name", "changes", "compressed"),
    [
        ("t5", {"dropout_rate": 0.3}, False),
        ("t5 gated", {"dropout_rate": 0.3}, False),
        ("m2m_100", {"dropout": 0.3, "activation_dropout": 0.3}, False),
        ("m2m_100", {"dropout": 0.3}, True),  # elsewhere than in the block
        ("opt", {"dropout": 0.3}, True),
    ],
)
def test_dropout(name, changes, compressed):
    model = make(name, **changes)
    before = step(model)
    bitsparse.convert(model)
    after = step(model)
    assert (after.live > 0) == compressed
    assert_same_step(after, before)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model = make(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    before = step(model)
    bitsparse.convert(model)
    assert_same_step(step(model), before)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_compiled(name):
    model = make(name)
    before = step(model)
    bitsparse.convert(model)
    compiled = torch.compile(model, backend="eager")
    after = step_of(
        model,
        lambda: ((r := compiled(input_ids=ids(), labels=ids(1), use_cache=False)).logits, r.loss),
    )
    assert_same_step(after, before)
    assert (after.live > 0) == (name == "llama")  # layers that compute inline run as before


def test_filter_and_report():
    model = make("opt")
    report = bitsparse.convert(model, filter=lambda name, module: name.endswith("1"))
    assert [c.name for c in report.converted] == ["model.decoder.layers.1"]
    assert step(model).live == 1
    assert "left out by filter" in str(report)


def test_other_activations_are_skipped():
    model = make("llama", hidden_act="silu")
    with pytest.warns(UserWarning, match="act_fn is SiLU"):
        report = bitsparse.convert(model)
    assert len(report.skipped) == 2
    with pytest.raises(ValueError, match="Llama"):
        bitsparse.convert(model, strict=True)


def test_a_class_that_computes_something_else_is_skipped(monkeypatch):
    model = make("llama")
    mlp = type(model.model.layers[0].mlp)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + self.extra

    forward.__module__ = mlp.__module__
    monkeypatch.setattr(mlp, "forward", forward)
    with pytest.warns(UserWarning, match="its forward is not the one that is known"):
        assert not bitsparse.convert(model).converted


def test_a_default_device_does_not_matter():
    model = make("opt")
    before = step(model)
    bitsparse.convert(model)
    with torch.device("cpu"):  # a mode that sees every function first
        after = step(model)
    assert after.live == 2
    assert_same_step(after, before)


def test_all_hidden_states_are_those_of_before():
    model = make("m2m_100")
    kwargs = {"input_ids": ids(), "labels": ids(1), "output_hidden_states": True}
    before = model(**kwargs)
    bitsparse.convert(model)
    after = model(**kwargs)
    assert live_tensors() == 2
    for a, b in zip(after.encoder_hidden_states, before.encoder_hidden_states, strict=True):
        assert torch.equal(a, b)


def test_inline_layers_under_function_transforms():
    model = make("opt")
    params = dict(model.named_parameters())

    def loss(params):
        return torch.func.functional_call(model, params, kwargs={"input_ids": ids()}).logits.sum()

    expected = torch.func.grad(loss)(params)
    bitsparse.convert(model)
    actual = torch.func.grad(loss)(params)
    assert all(torch.equal(actual[name], g) for name, g in expected.items())


def test_a_shared_activation_is_not_patched():
    model = make("opt")
    first, second = model.model.decoder.layers
    second.activation_fn = first.activation_fn
    with pytest.warns(UserWarning, match="activation_fn belongs to several modules"):
        assert not bitsparse.convert(model).converted


def test_inline_layers_hand_on_what_anybody_may_use():
    """What the patched activation returns is the activation's result to every operation."""
    model = make("opt")
    layer = model.model.decoder.layers[0]
    pre = torch.randn(5, 48, requires_grad=True)
    expected = torch.relu(pre)
    bitsparse.convert(model)
    pending = layer.activation_fn(pre * 1)
    assert isinstance(pending, Pending)
    assert torch.equal(pending, expected)
    assert torch.equal(pending + 1, expected + 1)
    assert torch.equal(torch.cat([pending, pending]), torch.cat([expected, expected]))
    assert pending.shape == expected.shape
    assert pending.requires_grad
    assert torch.equal(
        model.model.decoder.layers[1].fc2(pending), model.model.decoder.layers[1].fc2(expected)
    )
    again = layer.activation_fn(pre * 1)
    torch.manual_seed(3)
    dropped = nn.functional.dropout(again, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(dropped, nn.functional.dropout(expected, 0.5, True))
    twice = layer.activation_fn(pre * 1)
    assert torch.equal(layer.fc2(twice), layer.fc2(expected))
    assert torch.equal(layer.fc2(twice), layer.fc2(expected))
    assert torch.equal(twice.sum(), expected.sum())


def test_inline_layers_use_a_squared_activation_once():
    """The projection reuses the pre-activation's memory: later use is an error, never wrong."""
    model = make("opt")
    layer = model.model.decoder.layers[0]
    layer.activation_fn = transformers.activations.ACT2FN["relu2"]
    pre = torch.randn(5, 48, requires_grad=True)
    expected = layer.fc2(torch.relu(pre).square())
    bitsparse.convert(model)
    pending = layer.activation_fn(pre * 1)
    assert isinstance(pending, Pending)
    assert torch.equal(layer.fc2(pending), expected)
    for use in (layer.fc2, torch.sum):
        with pytest.raises(RuntimeError, match=r"has consumed it; bitsparse.revert"):
            use(pending)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_classes_of_this_version_are_known(family):
    """Classes of the table that are here compute what the table says, judged by their names."""
    from bitsparse.conversion.block import known_method

    for name in sorted(family.classes):
        module, cls = name.rsplit(".", 1)
        try:
            found = getattr(importlib.import_module(module), cls, None)
        except ImportError:
            continue  # another version
        if found is not None:
            assert known_method(found.__new__(found), family), name
