"""The modules that `convert` knows: one entry a family.

Classes are named, not imported, so that a library need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Modules that compute ``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Fields that name a child are names of attributes of the module.
    """

    name: str
    classes: frozenset[str]
    """``module.qualname`` of the classes; subclasses are others."""
    up: str
    act: str
    down: str
    gate: str | None = None
    dropout: str | None = None
    """An ``nn.Dropout`` between activation and down projection."""
    then: str | None = None
    """A module that the method calls with the result."""
    method: str = "forward"
    """The method that computes this and nothing else, from one tensor."""
    uses: frozenset[str] = field(default_factory=frozenset)
    """Other names that the method's code mentions; one that mentions more is not converted."""
    inline: bool = False
    """The module computes other things in the same method, where it calls these children."""

    @property
    def names(self) -> frozenset[str]:
        """What the method's code may mention."""
        children = (self.up, self.act, self.down, self.gate, self.dropout, self.then)
        return self.uses | {name for name in children if name is not None}


def _transformers(names: str) -> frozenset[str]:
    """``"t5.T5LayerFF"`` is ``transformers.models.t5.modeling_t5.T5LayerFF``."""
    pairs = [name.split(".") for name in names.split()]
    return frozenset(f"transformers.models.{m}.modeling_{m}.{cls}" for m, cls in pairs)


def _layers(names: str) -> str:
    """``"opt.OPT"`` is the encoder layer and the decoder layer of that name."""
    return " ".join(f"{n}EncoderLayer {n}DecoderLayer" for n in names.split())


# T5 casts to the dtype of `wo`, which may be kept in float32.
_CAST = frozenset({"isinstance", "weight", "torch", "Tensor", "dtype", "int8", "to"})

FAMILIES = (
    *(
        Family(
            f"torch {cls}",
            frozenset({f"torch.nn.modules.transformer.{cls}"}),
            up="linear1",
            act="activation",
            down="linear2",
            dropout="dropout",
            then=then,
            method="_ff_block",
        )
        for cls, then in (
            ("TransformerEncoderLayer", "dropout2"),
            ("TransformerDecoderLayer", "dropout3"),
        )
    ),
    Family(
        "Nemotron, Arcee, Jais2",
        _transformers("nemotron.NemotronMLP arcee.ArceeMLP jais2.Jais2MLP"),
        up="up_proj",
        act="act_fn",
        down="down_proj",
    ),
    Family(
        "Persimmon, Fuyu, GPT-NeoX",
        _transformers("persimmon.PersimmonMLP gpt_neox.GPTNeoXMLP"),
        up="dense_h_to_4h",
        act="act",
        down="dense_4h_to_h",
    ),
    Family(
        "NanoChat, Phi",
        _transformers("nanochat.NanoChatMLP phi.PhiMLP"),
        up="fc1",
        act="activation_fn",
        down="fc2",
    ),
    Family(
        "T5",
        _transformers(
            "t5.T5DenseActDense mt5.MT5DenseActDense umt5.UMT5DenseActDense udop.UdopDenseActDense "
            "longt5.LongT5DenseActDense switch_transformers.SwitchTransformersDenseActDense "
            "pop2piano.Pop2PianoDenseActDense"
        ),
        up="wi",
        act="act",
        down="wo",
        dropout="dropout",
        uses=_CAST,
    ),
    Family(
        "T5 gated",
        _transformers(
            "t5.T5DenseGatedActDense mt5.MT5DenseGatedActDense umt5.UMT5DenseGatedActDense "
            "udop.UdopDenseGatedActDense longt5.LongT5DenseGatedActDense "
            "pop2piano.Pop2PianoDenseGatedActDense"
        ),
        gate="wi_0",
        up="wi_1",
        act="act",
        down="wo",
        dropout="dropout",
        uses=_CAST,
    ),
    Family(
        "NLLB-MoE",
        _transformers("nllb_moe.NllbMoeDenseActDense"),
        up="fc1",
        act="act",
        down="fc2",
        dropout="dropout",
        uses=_CAST | {"uint8"},
    ),
    Family(
        "Llama",
        _transformers(
            "llama.LlamaMLP mistral.MistralMLP ministral.MinistralMLP "
            "qwen2.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_moe.Qwen3MoeMLP "
            "gemma.GemmaMLP gemma2.Gemma2MLP gemma3.Gemma3MLP cohere.CohereMLP cohere2.Cohere2MLP "
            "granite.GraniteMLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP smollm3.SmolLM3MLP "
            "stablelm.StableLmMLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP "
            "helium.HeliumMLP exaone4.Exaone4MLP diffllama.DiffLlamaMLP mllama.MllamaTextMLP"
        ),
        gate="gate_proj",
        up="up_proj",
        act="act_fn",
        down="down_proj",
    ),
    Family(
        "T5Gemma",
        _transformers("t5gemma.T5GemmaMLP t5gemma2.T5Gemma2MLP"),
        gate="gate_proj",
        up="up_proj",
        act="act_fn",
        down="down_proj",
        dropout="dropout",
    ),
    Family(
        "OPT, M2M-100, NLLB, BART",
        _transformers(
            "opt.OPTDecoderLayer xglm.XGLMDecoderLayer "
            + _layers(
                "m2m_100.M2M100 bart.Bart mbart.MBart marian.Marian pegasus.Pegasus plbart.PLBart "
                "blenderbot.Blenderbot speech_to_text.Speech2Text"
            )
        ),
        up="fc1",
        act="activation_fn",
        down="fc2",
        inline=True,
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
BY_CLASS = {name: family for family in FAMILIES for name in family.classes}


def class_name(cls: type) -> str:
    """As :attr:`Family.classes` has it."""
    return f"{cls.__module__}.{cls.__qualname__}"
