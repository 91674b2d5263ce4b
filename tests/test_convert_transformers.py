"""Converting models of transformers: tiny random ones, made from their configurations."""

import copy
import gc
import importlib
import inspect
import io
import pickle
import types

import pytest
import torch
from torch import nn

import bitsparse
from bitsparse.conversion import patch
from bitsparse.conversion.block import Pending
from bitsparse.conversion.families import FAMILIES
from convert_helpers import Adapter, Step, assert_same_step, live_tensors, step_of
from convert_helpers import step as tensor_step

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
NEMOTRON_H = {
    **TEXT,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

MODELS = {
    "nemotron": ("Nemotron", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "arcee": ("Arcee", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "jais2": ("Jais2", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "persimmon": ("Persimmon", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "neomme": ("NeoMME", "ForMaskedLM", {**TEXT, "head_dim": 16}, "relu2"),
    "cosmos3_edge": (
        "Cosmos3EdgeText",
        "Model",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
        "relu2",
    ),
    "nemotron_h": ("NemotronH", CAUSAL, NEMOTRON_H, "relu2"),
    "bitnet": ("BitNet", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "reglu2"),
    "bitnet relu": ("BitNet", CAUSAL, {**TEXT, "hidden_act": "relu"}, "reglu"),
    "rwkv": ("Rwkv", CAUSAL, {**TEXT, "attention_hidden_size": 16}, "relu2"),
    "gpt_neox": ("GPTNeoX", CAUSAL, {**TEXT, "hidden_act": "relu"}, "relu"),
    "nanochat": ("NanoChat", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "phi": ("Phi", CAUSAL, {**TEXT, "hidden_act": "relu"}, "relu"),
    "t5": ("T5", SEQ2SEQ, {**T5, "feed_forward_proj": "relu"}, "relu"),
    "t5, dropout": (
        "T5",
        SEQ2SEQ,
        {**T5, "feed_forward_proj": "relu", "dropout_rate": 0.3},
        "relu",
    ),
    "t5 gated, dropout": ("T5", SEQ2SEQ, {**GATED_T5, "dropout_rate": 0.3}, "reglu"),
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
        {
            **T5,
            "num_decoder_layers": 2,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
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
    "bart, dropout": ("Bart", SEQ2SEQ, {**BART, "activation_dropout": 0.3}, "relu"),
    "bart relu2, dropout": (
        "Bart",
        SEQ2SEQ,
        {**BART, "activation_dropout": 0.3, "activation_function": "relu2"},
        "relu2",
    ),
    "mbart": ("MBart", SEQ2SEQ, BART, "relu"),
    "mvp": ("Mvp", SEQ2SEQ, BART, "relu"),
    "blenderbot small": ("BlenderbotSmall", SEQ2SEQ, BART, "relu"),
    "fsmt": (
        "FSMT",
        SEQ2SEQ,
        {**BART, "langs": ["a", "b"], "src_vocab_size": 60, "tgt_vocab_size": 60},
        "relu",
    ),
    "apertus": ("Apertus", CAUSAL, {**TEXT, "hidden_act": "relu2"}, "relu2"),
    "pegasus": ("Pegasus", SEQ2SEQ, BART, "relu"),
    "marian": ("Marian", "MTModel", {**BART, "pad_token_id": 0}, "relu"),
}
MAIN = ["nemotron", "llama", "t5 gated", "opt", "m2m_100", "bitnet", "rwkv"]
EXPERTS = ["switch", "nllb_moe", "nemotron_h"]
# Of each row of the table in docs/convert.md.
ROWS = [*MAIN, *EXPERTS, "persimmon", "nanochat", "t5", "t5, dropout", "bart, dropout"]


def make(name: str, **changes: object) -> nn.Module:
    family, suffix, config, _ = MODELS[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**{**config, **changes})
    return getattr(transformers, family + suffix)(made).train()


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, config: object = None) -> Step:
    """``config``: of the model, where a wrapper hides it."""
    headless = type(config or model.config).__name__ == "Cosmos3EdgeTextConfig"

    def forward():
        kwargs = {} if headless else {"labels": ids(1)}
        result = model(input_ids=ids(), use_cache=False, **kwargs)
        if headless:
            out = result.last_hidden_state
            return out, out.float().square().mean()
        return result.logits, result.loss

    return step_of(model, forward)


@pytest.fixture(autouse=True)
def small_experts(monkeypatch):
    monkeypatch.setattr(patch, "EXPERT_MIN_BYTES", 0)


@pytest.mark.parametrize("name", MODELS)
def test_same_bits_and_compressed(name):
    model = make(name)
    before = step(model)
    drawn = torch.get_rng_state()
    report = bitsparse.convert(model, strict=True)
    assert {c.activation for c in report.converted} == {MODELS[name][3]}
    assert not [s for s in report.skipped if "GELU" not in s.reason]  # of other parts
    after = step(model)
    if name not in EXPERTS:  # experts that are given one token, or none, keep nothing compressed
        assert after.live == len(report.converted)
    assert after.live > 0
    assert_same_step(after, before)
    assert torch.equal(torch.get_rng_state(), drawn)


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


@pytest.fixture(scope="module")
def one_process():
    dist = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed, gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # wrapped models are cycles, and must end before the group does
    dist.destroy_process_group()


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    layers = [m for m in model.modules() if type(m).__name__.endswith(("Layer", "Block"))]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_distributed(one_process, name, wrap):
    """With one process; test_distributed.py has two, of fewer blocks."""
    model = make(name)
    config = model.config
    before = step(wrap(copy.deepcopy(model)), config)
    bitsparse.convert(model)
    after = step(wrap(model), config)
    assert after.live > 0
    assert_same_step(after, before)


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
@pytest.mark.parametrize("order", ["convert first", "wrap first"])
def test_distributed_modules_of_torch(one_process, wrap, order):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 48, 0.0), 2)
    x = torch.randn(5, 3, 16)
    before = tensor_step(wrap(copy.deepcopy(model)), x)
    if order == "convert first":
        bitsparse.convert(model)
        model = wrap(model)
    else:
        model = wrap(model)
        bitsparse.convert(model, strict=True)
    after = tensor_step(model, x)
    assert after.live == 2
    assert_same_step(after, before)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("order", ["convert first", "peft first"])
def test_peft(name, order):
    """Adapters on attention leave the blocks compressed; on a projection, run as before."""
    peft = pytest.importorskip("peft", reason="needs peft")
    made = make(name)
    block, children = blocks(made)[0]
    names = {m: n for n, m in made.named_modules() if type(m) is nn.Linear}
    inside = next(names[m] for c in children if (m := getattr(block, c)) in names)
    outside = next(n for n in names.values() if n.rpartition(".")[2] not in children)
    for target, missing in ((outside, 0), (inside, 1)):
        steps = []
        for convert in (False, True):
            model = make(name)
            count = 0
            if convert and order == "convert first":
                count = len(bitsparse.convert(model).converted)
            torch.manual_seed(2)
            config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
            adapted = peft.get_peft_model(model, config)
            if convert and order == "peft first":
                count = len(bitsparse.convert(adapted).converted) + missing
            steps.append(step(adapted, model.config))
        before, after = steps
        assert after.live <= count - missing
        assert after.live >= 1
        assert_same_step(after, before)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model = make(name)
    if not model.supports_gradient_checkpointing:
        pytest.skip("the model has none")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    before = step(model)
    bitsparse.convert(model)
    assert_same_step(step(model), before)


@pytest.mark.parametrize("name", MODELS)
def test_generation_and_files(name, tmp_path):
    model = make(name)
    kwargs = {"max_new_tokens": 4, "min_new_tokens": 4}
    ways = [{"do_sample": False}, {"do_sample": True}]
    if name != "rwkv":  # its state cannot be reordered
        ways.append({"do_sample": False, "num_beams": 2})

    def generated() -> list[torch.Tensor]:
        if not model.can_generate():
            return []
        torch.manual_seed(0)
        model.eval()
        outputs = [model.generate(ids(), **kwargs, **way) for way in ways]
        model.train()
        return outputs

    before = generated()
    model.save_pretrained(tmp_path / "before")
    bitsparse.convert(model)
    assert all(torch.equal(a, b) for a, b in zip(generated(), before, strict=True))
    assert live_tensors() == 0
    model.save_pretrained(tmp_path / "after")
    old, new = (sorted((tmp_path / d).iterdir()) for d in ("before", "after"))
    assert [f.name for f in old] == [f.name for f in new]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(new, old, strict=True))
    loaded = type(model).from_pretrained(tmp_path / "after").train()
    assert bitsparse.revert(loaded) == 0
    expected = step(loaded)
    bitsparse.convert(loaded)
    assert_same_step(step(loaded), expected)


BARE = """canary.CanaryDecoderMLP cohere_asr.CohereAsrDecoderMLP tipsv2.Tipsv2MLP
    nemotron3_diarization.Nemotron3DiarizationMLP videoprism.VideoPrismMLP
    seamless_m4t.SeamlessM4TFeedForwardNetwork seamless_m4t_v2.SeamlessM4Tv2FeedForwardNetwork
    detr.DetrMLP conditional_detr.ConditionalDetrMLP deformable_detr.DeformableDetrMLP
    maskformer.MaskFormerDetrMLP rt_detr.RTDetrMLP rt_detr_v2.RTDetrV2MLP lw_detr.LwDetrMLP
    rf_detr.RfDetrMLP pp_doclayout_v2.PPDocLayoutV2MLP pp_doclayout_v3.PPDocLayoutV3MLP
    pp_doclayout_v4.PPDocLayoutV4MLP fun_asr_nano.FunAsrNanoMLP
    parakeet.ParakeetEncoderFeedForward wav2vec2.Wav2Vec2FeedForward hubert.HubertFeedForward
    wavlm.WavLMFeedForward sew.SEWFeedForward unispeech.UniSpeechFeedForward
    speecht5.SpeechT5FeedForward sam.SamMLPBlock clip.CLIPMLP siglip.SiglipMLP
    nemotron_asr_streaming.NemotronAsrStreamingEncoderFeedForward""".split()


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_feed_forward_modules_by_themselves(name, dropout, autocast):
    """Of models too large for a tiny configuration."""
    family, cls_name = name.split(".")
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        cls = getattr(module, cls_name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {cls_name}")
    sizes = {"hidden_size": 16, "d_model": 16, "intermediate_size": 48, "decoder_ffn_dim": 48}
    sizes["mlp_dim"] = 48
    names = ("hidden_act", "activation_function", "decoder_activation_function")
    rates = ("dropout", "activation_dropout", "hidden_dropout")
    config = types.SimpleNamespace(
        **sizes,
        **dict.fromkeys(names, "relu"),
        **dict.fromkeys(rates, dropout),
        attention_bias=True,
    )
    arguments = {"hidden_size": 16, "intermediate_size": 48, "ffn_dim": 48}
    accepted = inspect.signature(cls).parameters
    arguments = {k: v for k, v in arguments.items() if k in accepted}
    if "activation_function" in accepted:
        arguments["activation_function"] = "relu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), cls(config, **arguments))
    x = torch.randn(3, 5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = tensor_step(model, x)
    report = bitsparse.convert(model, strict=True)
    assert [c.activation for c in report.converted] == ["relu"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = tensor_step(model, x)
    assert after.live == 1
    assert_same_step(after, before)


@pytest.mark.parametrize("name", ["nemotron_h"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_tensor(name, implementation, autocast, dtype):
    """However transformers computes them, also those that are given no token."""
    model = make(name, n_routed_experts=16).to(dtype)
    model.set_experts_implementation(implementation)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = step(model)
    report = bitsparse.convert(model)
    experts = [c for c in report.converted if c.family == "Nemotron-H experts"]
    assert len(experts) == 2
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = step(model)
    # ReLU's result is kept for the square, and its square for the down projection.
    fewest = len(report.converted) + 2 * (implementation != "batched_mm")
    assert after.live >= fewest if implementation != "batched_mm" else after.live == fewest
    assert_same_step(after, before)


def test_experts_leave_the_hooks_of_others_alone():
    model = make("nemotron_h")
    bitsparse.convert(model, filter=lambda name, module: name.endswith(".experts"))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert step(model).live == 0
    assert any(t.shape[-1] == 48 and t.grad_fn is not None for t in seen)
    assert step(model).live > 0


@pytest.mark.parametrize("trained", ["gate_proj", "up_proj", "ffn_sub_norm", "down_proj"])
def test_bitnet_with_frozen_parameters(trained):
    model = make("bitnet")
    for parameter_name, p in model.named_parameters():
        p.requires_grad_(trained in parameter_name)
    before = step(model)
    bitsparse.convert(model)
    after = step(model)
    assert after.live == 2
    assert_same_step(after, before)


@pytest.mark.parametrize("change", ["hook", "other norm", "forward"])
def test_bitnet_with_another_norm_runs_as_before(change):
    model = make("bitnet")
    count = len(bitsparse.convert(model).converted)
    mlp = model.model.layers[0].mlp
    if change == "hook":
        mlp.ffn_sub_norm.register_forward_hook(lambda *args: args[2] * 2)
    elif change == "other norm":
        mlp.ffn_sub_norm = nn.LayerNorm(48)
    else:
        mlp.ffn_sub_norm.forward = lambda x: x * 2
    after = step(model)
    assert after.live == count - 1
    bitsparse.revert(model)
    assert_same_step(after, step(model))


def test_functions_hand_on_what_anybody_may_use():
    """RWKV calls functions: what its patched projection returns is the result to any other."""
    model = make("rwkv")
    block = model.rwkv.blocks[0].feed_forward
    x = torch.randn(2, 5, 16)
    pre = block.key(x)
    bitsparse.convert(model)
    pending = block.key(x)
    assert isinstance(pending, Pending)
    assert torch.equal(pending, pre)
    half = torch.relu(block.key(x))
    assert isinstance(half, Pending)
    assert torch.equal(half + 1, torch.relu(pre) + 1)
    assert torch.equal(torch.relu(torch.relu(block.key(x))), torch.relu(pre))
    assert torch.equal(torch.square(block.key(x)), pre.square())
    whole = torch.square(torch.relu(block.key(x)))
    assert torch.equal(whole.mean(), torch.relu(pre).square().mean())
    start = block.key(x)
    block.value(torch.square(torch.relu(start)))
    with pytest.raises(RuntimeError, match="has consumed it"):
        start.sum()


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


@pytest.mark.parametrize("name", ["m2m_100", "opt"])
def test_dropout_elsewhere(name):
    model = make(name, dropout=0.3)
    before = step(model)
    count = len(bitsparse.convert(model).converted)
    after = step(model)
    assert after.live == count
    assert_same_step(after, before)


def compiled_step(model: nn.Module, **kwargs: object) -> Step:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", **kwargs)

    def forward():
        result = compiled(input_ids=ids(), labels=ids(1), use_cache=False)
        return result.logits, result.loss

    return step_of(model, forward)


@pytest.mark.parametrize("name", ["nemotron", "arcee", "persimmon", "nanochat", "t5", "llama"])
def test_compiled_as_one_graph(name):
    model = make(name)
    before = step(model)
    count = len(bitsparse.convert(model).converted)
    after = compiled_step(model, fullgraph=True)
    assert after.live == count
    assert_same_step(after, before)


@pytest.mark.parametrize("name", ["opt", "rwkv", "bitnet", "t5, dropout"])
def test_compiled_as_before(name):
    """Layers that compute inline, and blocks with something before the down projection."""
    model = make(name)
    before = step(model)
    bitsparse.convert(model)
    after = compiled_step(model)
    assert after.live == 0
    assert_same_step(after, before)


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
