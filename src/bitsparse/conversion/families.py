"""The modules that `convert` knows: one entry a family.

Classes are named, not imported, so that a library need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Modules that compute ``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Fields that name a child are names of attributes of the module. Before ``down`` there may be
    ``dropout`` or ``norm``.
    """

    name: str
    classes: frozenset[str]
    """``module.qualname`` of the classes. Where the family is not ``inline``, any other class with
    such children and the same computation will do."""
    up: str
    down: str
    act: str | None = None
    """None: ``functional`` says what the method calls."""
    functional: str | None = None
    """"relu2": ``torch.square(torch.relu(...))`` in a method that is ``inline``."""
    gate: str | None = None
    dropout: str | None = None
    """An ``nn.Dropout`` between activation and down projection."""
    norm: str | None = None
    """A module of one of :data:`NORMS` there."""
    then: str | None = None
    """A module that the method calls with the result."""
    method: str = "forward"
    """The method that computes this and nothing else, from one tensor."""
    uses: frozenset[str] = field(default_factory=frozenset)
    """Other names that the method's code mentions, where it is not ``inline``."""
    inline: bool = False
    """The module computes other things in the same method, where it calls these children."""

    @property
    def children(self) -> tuple[str, ...]:
        """In the order in which the method calls them."""
        first = (self.up, self.act) if self.gate is None else (self.gate, self.act, self.up)
        names = (*first, self.dropout, self.norm, self.down, self.then)
        return tuple(name for name in names if name is not None)

    @property
    def names(self) -> frozenset[str]:
        """What the method's code may mention."""
        return self.uses.union(self.children)


def _transformers(names: str) -> frozenset[str]:
    """``"t5.T5LayerFF"`` is ``transformers.models.t5.modeling_t5.T5LayerFF``."""
    pairs = [name.split(".") for name in names.split()]
    return frozenset(f"transformers.models.{m}.modeling_{m}.{cls}" for m, cls in pairs)


def _layers(names: str) -> str:
    """``"opt.OPT"`` is the encoder layer and the decoder layer of that name."""
    return " ".join(f"{n}EncoderLayer {n}DecoderLayer" for n in names.split())


NORMS = _transformers("bitnet.BitNetRMSNorm")
"""What they compute depends on their input and parameters alone, the same each time."""

# T5 casts to the dtype of `wo`, which may be kept in float32.
_CAST = frozenset({"isinstance", "weight", "torch", "Tensor", "dtype", "int8", "to"})

EXPERTS = _transformers("nemotron_h.NemotronHExperts")
"""Experts whose weights are in one tensor, with children ``act_fn`` and a parameter ``down_proj``.

However they are computed (the library has several ways), the hidden tensor is an intermediate
result with as many columns as ``down_proj``.
"""

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
        "Nemotron, Arcee, Jais2, NeoMME",
        _transformers(
            "nemotron.NemotronMLP arcee.ArceeMLP jais2.Jais2MLP nemotron_h.NemotronHMLP "
            "neomme.NeoMMEMLP"
        ),
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
        "NanoChat, Phi, Cosmos3 Edge",
        _transformers(
            "nanochat.NanoChatMLP phi.PhiMLP cosmos3_edge.Cosmos3EdgeTextMLP "
            "canary.CanaryDecoderMLP cohere_asr.CohereAsrDecoderMLP tipsv2.Tipsv2MLP "
            "nemotron3_diarization.Nemotron3DiarizationMLP videoprism.VideoPrismMLP"
        ),
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
        "NLLB-MoE, Seamless",
        _transformers(
            "nllb_moe.NllbMoeDenseActDense seamless_m4t.SeamlessM4TFeedForwardNetwork "
            "seamless_m4t_v2.SeamlessM4Tv2FeedForwardNetwork"
        ),
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
        "BitNet",
        _transformers("bitnet.BitNetMLP"),
        gate="gate_proj",
        up="up_proj",
        act="act_fn",
        norm="ffn_sub_norm",
        down="down_proj",
    ),
    Family(
        "wav2vec 2.0",
        _transformers(
            "wav2vec2.Wav2Vec2FeedForward hubert.HubertFeedForward wavlm.WavLMFeedForward "
            "sew.SEWFeedForward unispeech.UniSpeechFeedForward speecht5.SpeechT5FeedForward"
        ),
        up="intermediate_dense",
        act="intermediate_act_fn",
        dropout="intermediate_dropout",
        down="output_dense",
        then="output_dropout",
    ),
    Family(
        "SAM",
        _transformers("sam.SamMLPBlock sam_hq.SamHQMLPBlock"),
        up="lin1",
        act="act",
        down="lin2",
    ),
    Family(
        "fc1, act, fc2",
        frozenset(),
        up="fc1",
        act="act",
        down="fc2",
    ),
    Family(
        "linear1, activation, dropout, linear2",
        _transformers("omdet_turbo.OmDetTurboMLPWithDropout"),
        up="linear1",
        act="activation",
        dropout="dropout",
        down="linear2",
    ),
    Family(
        "RWKV",
        _transformers("rwkv.RwkvFeedForward"),
        up="key",
        functional="relu2",
        down="value",
        inline=True,
    ),
    Family(
        "OPT, M2M-100, NLLB, BART",
        _transformers(
            "opt.OPTDecoderLayer xglm.XGLMDecoderLayer trocr.TrOCRDecoderLayer "
            "musicgen.MusicgenDecoderLayer musicgen_melody.MusicgenMelodyDecoderLayer "
            + _layers(
                "m2m_100.M2M100 bart.Bart mbart.MBart marian.Marian pegasus.Pegasus plbart.PLBart "
                "blenderbot.Blenderbot blenderbot_small.BlenderbotSmall pegasus_x.PegasusX "
                "bigbird_pegasus.BigBirdPegasus led.LED mvp.Mvp fsmt. whisper.Whisper "
                "speech_to_text.Speech2Text informer.Informer autoformer.Autoformer "
                "time_series_transformer.TimeSeriesTransformer"
            )
        ),
        up="fc1",
        act="activation_fn",
        down="fc2",
        inline=True,
    ),
    Family(
        "Grounding DINO text",
        _transformers(
            "grounding_dino.GroundingDinoTextEnhancerLayer "
            "mm_grounding_dino.MMGroundingDinoTextEnhancerLayer"
        ),
        up="fc1",
        act="activation",
        down="fc2",
        inline=True,
    ),
    Family(
        "DETR",
        _transformers(
            "detr.DetrMLP conditional_detr.ConditionalDetrMLP deformable_detr.DeformableDetrMLP "
            "maskformer.MaskFormerDetrMLP rt_detr.RTDetrMLP rt_detr_v2.RTDetrV2MLP "
            "lw_detr.LwDetrMLP rf_detr.RfDetrMLP pp_doclayout_v2.PPDocLayoutV2MLP "
            "pp_doclayout_v3.PPDocLayoutV3MLP pp_doclayout_v4.PPDocLayoutV4MLP "
            "fun_asr_nano.FunAsrNanoMLP dab_detr.DabDetrDecoderLayerFFN "
            "dab_detr.DabDetrEncoderLayer table_transformer.TableTransformerEncoderLayer "
            "table_transformer.TableTransformerDecoderLayer "
            "omdet_turbo.OmDetTurboEncoderLayer mask2former.Mask2FormerPixelDecoderEncoderLayer "
            "mask2former.Mask2FormerMaskedAttentionDecoderLayer "
            "oneformer.OneFormerPixelDecoderEncoderLayer "
            "grounding_dino.GroundingDinoDeformableLayer "
            "grounding_dino.GroundingDinoDecoderLayer "
            "mm_grounding_dino.MMGroundingDinoDeformableLayer "
            "mm_grounding_dino.MMGroundingDinoDecoderLayer"
        ),
        up="fc1",
        act="activation_fn",
        down="fc2",
        inline=True,
    ),
    Family(
        "Parakeet",
        _transformers(
            "parakeet.ParakeetEncoderFeedForward "
            "nemotron_asr_streaming.NemotronAsrStreamingEncoderFeedForward"
        ),
        up="linear1",
        act="activation",
        down="linear2",
        inline=True,
    ),
)

BY_NAME = {family.name: family for family in FAMILIES}
BY_CLASS = {name: family for family in FAMILIES for name in family.classes}
BY_CHILDREN = tuple(family for family in FAMILIES if not family.inline)


def class_name(cls: type) -> str:
    """As :attr:`Family.classes` has it."""
    return f"{cls.__module__}.{cls.__qualname__}"
