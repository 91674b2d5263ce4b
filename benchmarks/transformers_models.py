"""Tiny ReLU models for the common model tests of transformers; see transformers_suite.py.

Stands in for ``tests/models`` of transformers, which its source distribution does not have.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
import transformers
from tests import test_modeling_common as common

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    **TEXT,
    "ffn_dim": 40,
    "word_embed_proj_dim": 32,
    "activation_function": "relu",
}
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "activation_function": "relu",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
NEMOTRON_H = {
    **TEXT,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "use_mamba_kernels": False,
}
RELU, RELU2 = {"hidden_act": "relu"}, {"hidden_act": "relu2"}
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")

# Name of the test class: library prefix, configuration, heads.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "OPT": ("OPT", OPT, HEADS),
    "T5": ("T5", {**T5, "feed_forward_proj": "relu"}, ("Model", "ForConditionalGeneration")),
    "T5Gated": (
        "T5",
        {**T5, "feed_forward_proj": "gated-relu", "dropout_rate": 0.0},
        ("Model", "ForConditionalGeneration"),
    ),
    "Bart": ("Bart", BART, ("Model", "ForConditionalGeneration")),
    "M2M100": ("M2M100", BART, ("Model", "ForConditionalGeneration")),
    "Nemotron": ("Nemotron", {**TEXT, **RELU2}, HEADS),
    "Persimmon": ("Persimmon", {**TEXT, **RELU2}, HEADS),
    "BitNet": ("BitNet", {**TEXT, **RELU2}, HEADS[:2]),
    "NanoChat": ("NanoChat", {**TEXT, **RELU2}, HEADS[:2]),
    "Arcee": ("Arcee", {**TEXT, **RELU2}, HEADS),
    "Jais2": ("Jais2", {**TEXT, **RELU2}, HEADS[:2]),
    "Llama": ("Llama", {**TEXT, **RELU}, HEADS),
    "Rwkv": ("Rwkv", {**TEXT, "attention_hidden_size": 32}, HEADS[:2]),
    "NemotronH": ("NemotronH", NEMOTRON_H, HEADS[:2]),
}


class Tester:
    """What the common tests ask of a model's tester."""

    batch_size = 5
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    is_training = True
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32

    def __init__(self, prefix: str, config: dict[str, Any]) -> None:
        self.config_class = getattr(transformers, f"{prefix}Config")
        self.config = config
        self.is_encoder_decoder = "num_heads" in config or "encoder_layers" in config
        if "layers_block_type" in config:
            self.num_hidden_layers = len(config["layers_block_type"])

    def get_config(self) -> Any:
        return self.config_class(**self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        def ids() -> torch.Tensor:
            return common.ids_tensor([self.batch_size, self.seq_length], 99).clamp(3)

        mask = common.random_attention_mask([self.batch_size, self.seq_length])
        inputs = {"input_ids": ids(), "attention_mask": mask}
        if self.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids()
            inputs["decoder_attention_mask"] = mask
        return self.get_config(), inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def _test_class(name: str) -> type[unittest.TestCase]:
    prefix, config, heads = CASES[name]

    def set_up(self: Any) -> None:
        self.model_tester = Tester(prefix, config)

    members = {
        "setUp": set_up,
        "all_model_classes": tuple(
            getattr(transformers, prefix + h) for h in heads if hasattr(transformers, prefix + h)
        ),
        "is_encoder_decoder": "ForConditionalGeneration" in heads,
        "has_attentions": name != "Rwkv",
        "__module__": __name__,
    }
    return type(f"{name}Test", (common.ModelTesterMixin, unittest.TestCase), members)


for _name in CASES:
    if hasattr(transformers, f"{CASES[_name][0]}Config"):
        globals()[f"{_name}Test"] = _test_class(_name)
