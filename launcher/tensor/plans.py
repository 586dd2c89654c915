"""Plans by model type, for models without a plan in transformers, and to improve some of theirs.

For a type that has a plan in transformers, rows replace its rows of the same name, or are added to them. To
add a model, add a row to _PLANS. Names are relative to the base model: `layers.*.self_attn`, not
`model.layers.*.self_attn`. Embedding and head need no row.
"""

from __future__ import annotations

from launcher.tensor.rule import ConfigCase, SplitRule, TensorParallelPlan
from launcher.tensor.rule import at as _at
from launcher.tensor.rule import counts as _counts
from launcher.tensor.rule import inside as _inside
from launcher.tensor.rule import whole as _whole

_SUMMED = "replicated_with_grad_allreduce"
_QKV = "q_proj k_proj v_proj"
_Q_K_V = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")

_GATED = _at("layers.*.mlp", colwise="gate_proj up_proj", rowwise="down_proj")
_LLAMA = _at("layers.*.self_attn", colwise=_QKV, rowwise="o_proj") | _GATED
_4H = _at("mlp", colwise="dense_h_to_4h", rowwise="dense_4h_to_h")


_GPT2 = (
    _counts("h.*.attn", "num_heads split_size")
    | {"h.*.attn.c_attn": SplitRule("colwise", packed=(1, 1, 1))}
    | _counts("h.*.crossattention", "num_heads split_size")
    | {
        "h.*.crossattention.c_attn": SplitRule("colwise", packed=(1, 1)),
        "h.*.crossattention.q_attn": "colwise",
    }
    | {"h.*.attn.c_proj": "rowwise", "h.*.crossattention.c_proj": "rowwise"}
    | _at("h.*.mlp", colwise="c_fc", rowwise="c_proj")
)
_BIGCODE_OTHERS = {"h.*.attn.c_proj": "rowwise"} | _at("h.*.mlp", colwise="c_fc", rowwise="c_proj")


_PERSIMMON = (
    _counts("layers.*.self_attn", "num_heads")
    | _at("layers.*.self_attn", colwise="query_key_value", rowwise="dense")
    | _at("layers.*.self_attn", **{_SUMMED: "q_layernorm k_layernorm"})
    | _inside("layers.*", _4H)
)


def _attention(place: str, counts: str = "num_heads") -> dict[str, str | SplitRule]:
    """Return the rules of attention with the names of the first encoder-decoder models."""
    return _counts(place, counts) | _at(place, colwise=_QKV, rowwise="out_proj")


def _decoder(place: str, counts: str = "num_heads") -> dict[str, str | SplitRule]:
    layer = _attention("self_attn", counts) | _attention("encoder_attn", counts)
    return _inside(place, layer | {"fc1": "colwise", "fc2": "rowwise"})


_INKLING = _at("layers.*.mlp", packed_colwise="experts.gate_up_proj", moe_tp_experts="shared_experts")

_BART = _decoder("decoder.layers.*")
_XGLM = _decoder("layers.*", "num_heads embed_dim")

_BERT_BLOCK = (
    _counts("attention.self", "num_attention_heads all_head_size")
    | _at("attention", colwise="self.query self.key self.value", rowwise="output.dense")
    | _counts("crossattention.self", "num_attention_heads all_head_size")
    | _at("crossattention", colwise="self.query self.key self.value", rowwise="output.dense")
    | {"intermediate.dense": "colwise", "output.dense": "rowwise"}
)
_BERT = _inside("encoder.layer.*", _BERT_BLOCK)

_LFM = (
    _at("layers.*.self_attn", colwise=_QKV)
    | _at("layers.*.feed_forward", colwise="w1 w3", rowwise="w2")
    | {
        "layers.*.conv.in_proj": SplitRule("colwise", packed=(1, 1, 1)),
        "layers.*.conv.conv": SplitRule("channels", divide=("in_channels", "out_channels", "groups")),
        "layers.*.conv.out_proj": "rowwise",
    }
)
_BLT = (
    _counts("layers.*.self_attn", "num_heads num_key_value_heads", replicates=True)
    | _LLAMA
    | _counts("cross_attn_layers.*", "num_heads num_key_value_heads", replicates=True)
    | _at("cross_attn_layers.*", colwise=_QKV, rowwise="o_proj")
)
_FALCON = "h.*.self_attention"
_ALIBI = {"alibi": 1, "attention_mask": 1}

_PLANS: dict[str, TensorParallelPlan | tuple[ConfigCase, ...]] = {
    "gpt2 gpt-sw3": _GPT2,
    "openai-gpt": _counts("h.*.attn", "n_head split_size")
    | {"h.*.attn.c_attn": SplitRule("colwise", packed=(1, 1, 1)), "h.*.attn.c_proj": "rowwise"}
    | _at("h.*.mlp", colwise="c_fc", rowwise="c_proj"),
    "gpt_neo": _attention("h.*.attn.attention") | _at("h.*.mlp", colwise="c_fc", rowwise="c_proj"),
    "gptj": _attention("h.*.attn", "num_attention_heads") | _at("h.*.mlp", colwise="fc_in", rowwise="fc_out"),
    # Written for four TPU cores: query, value and key of each core are packed one after the other.
    "codegen": _counts("h.*.attn", "num_attention_heads")
    | {"h.*.attn.qkv_proj": SplitRule("colwise", packed=(1, 1, 1), repeat=4)}
    | {"h.*.attn.out_proj": SplitRule("rowwise", repeat=4)}
    | _at("h.*.mlp", colwise="fc_in", rowwise="fc_out"),
    "gpt_bigcode": (
        ConfigCase(_BIGCODE_OTHERS),
        ConfigCase(
            _counts("h.*.attn", "num_heads embed_dim")
            | {
                "h.*.attn.c_attn": SplitRule(
                    "colwise", packed=("num_attention_heads", 1, 1), replicates=True, grain="head_dim"
                )
            },
            when={"multi_query": True},
        ),
        ConfigCase(
            _counts("h.*.attn", "num_heads kv_heads embed_dim kv_dim") | {"h.*.attn.c_attn": "colwise"},
            when={"multi_query": False},
        ),
    ),
    "opt": _decoder("decoder.layers.*"),
    "bloom": (
        ConfigCase(
            _counts("h.*.self_attention", "num_heads", heads={"alibi": 0})
            | _at("h.*.self_attention", colwise="query_key_value", rowwise="dense")
            | _inside("h.*", _4H),
            when={"slow_but_exact": False},  # otherwise the model slices the weights of its layers itself
        ),
    ),
    "falcon": (
        ConfigCase(_inside("h.*", _4H) | {f"{_FALCON}.dense": "rowwise"}),
        ConfigCase(
            _counts(_FALCON, "num_heads num_kv_heads", heads=_ALIBI)
            | {f"{_FALCON}.query_key_value": "colwise"},
            when={"new_decoder_architecture": True},
        ),
        ConfigCase(
            _counts(_FALCON, "num_heads num_kv_heads", heads=_ALIBI)
            | {f"{_FALCON}.query_key_value": "colwise"},
            when={"new_decoder_architecture": False, "multi_query": False},
        ),
        ConfigCase(
            _counts(_FALCON, "num_heads", heads=_ALIBI)
            | {
                f"{_FALCON}.query_key_value": SplitRule(
                    "colwise", packed=("num_attention_heads", 1, 1), replicates=True
                )
            },
            when={"new_decoder_architecture": False, "multi_query": True},
        ),
        # Falcon-7B: no degree divides its number of heads.
        ConfigCase(
            {_FALCON: "replicate"} | _whole(_FALCON, "query_key_value", "dense"),
            when={"new_decoder_architecture": False, "multi_query": True, "num_attention_heads": 71},
        ),
    ),
    "mpt": _counts("blocks.*.attn", "n_heads hidden_size", heads={"position_bias": 0})
    | {"blocks.*.attn.Wqkv": SplitRule("colwise", packed=(1, 1, 1)), "blocks.*.attn.out_proj": "rowwise"}
    | _at("blocks.*.ffn", colwise="up_proj", rowwise="down_proj"),
    "stablelm": (
        ConfigCase(_GATED),
        ConfigCase(
            _counts("layers.*.self_attn", "num_heads num_key_value_heads", replicates=True) | _LLAMA,
            when={"qk_layernorm": False},
        ),
        # One norm per head: attention is computed whole.
        ConfigCase(
            _at("layers.*.self_attn", colwise_gather_output=_QKV, rowwise_split_input="o_proj"),
            when={"qk_layernorm": True},
        ),
    ),
    "phi3": _counts("layers.*.self_attn", "config.num_attention_heads num_key_value_heads", replicates=True)
    | {"layers.*.self_attn.qkv_proj": SplitRule("colwise", packed=_Q_K_V, replicates=True)}
    | {"layers.*.self_attn.o_proj": "rowwise"}
    | _at("layers.*.mlp", packed_colwise="gate_up_proj", rowwise="down_proj"),
    "persimmon": _PERSIMMON,
    "gpt_neox_japanese": _counts("layers.*.attention", "num_attention_heads")
    | _at("layers.*.attention", colwise="query_key_value", rowwise="dense")
    | _inside("layers.*", _4H),
    "hunyuan_v1_dense": _LLAMA | _at("layers.*.self_attn", **{_SUMMED: "query_layernorm key_layernorm"}),
    # Differential attention: the second half of the heads is subtracted from the first.
    "diffllama": {f"layers.*.self_attn.{name}": SplitRule("colwise", packed=(1, 1)) for name in _QKV.split()}
    | _at("layers.*.self_attn", rowwise="o_proj", **{_SUMMED: "lambda_q1 lambda_k1 lambda_q2 lambda_k2"})
    | _GATED,
    "bitnet": _LLAMA
    | {"layers.*.self_attn.attn_sub_norm": "whole_norm", "layers.*.mlp.ffn_sub_norm": "whole_norm"},
    "gpt_oss": _at("layers.*.self_attn", colwise=f"{_QKV} sinks", rowwise="o_proj")
    | {"layers.*.mlp.experts": SplitRule("moe_tp_experts", once=("down_proj_bias",))}
    | _at("layers.*.mlp.experts", last="gate_up_proj gate_up_proj_bias", colwise="down_proj"),
    "dbrx": _counts(
        "blocks.*.norm_attn_norm.attn", "hidden_size num_heads num_key_value_heads", replicates=True
    )
    | {
        "blocks.*.norm_attn_norm.attn.Wqkv": SplitRule(
            "colwise",
            packed=("n_heads", "attn_config.kv_n_heads", "attn_config.kv_n_heads"),
            replicates=True,
            grain="head_dim",
        ),
        "blocks.*.norm_attn_norm.attn.out_proj": "rowwise",
        "blocks.*.ffn.experts": SplitRule("moe_tp_experts", divide=("ffn_hidden_size",)),
    }
    | {
        f"blocks.*.ffn.experts.mlp.{name}": SplitRule("colwise", repeat="ffn_config.moe_num_experts")
        for name in ("w1", "v1", "w2")
    },
    "jetmoe": _counts("layers.*.self_attention", "num_key_value_heads")
    | _counts("layers.*.self_attention.experts", "hidden_size")
    | _at(
        "layers.*.self_attention",
        packed_colwise="kv_proj",
        colwise="experts.input_linear",
        rowwise="experts.output_linear",
    )
    | _at("layers.*.mlp", packed_colwise="input_linear", rowwise="output_linear"),
    "lfm2": _LFM | _at("layers.*.self_attn", rowwise="out_proj", **{_SUMMED: "q_layernorm k_layernorm"}),
    "lfm3": _LFM
    | _at("layers.*.self_attn", rowwise="o_proj", **{_SUMMED: "q_norm k_norm"})
    | {"layers.*.self_attn.g_proj": "colwise"},
    "ctrl": _counts("h.*.multi_head_attention", "num_heads")
    | _at("h.*", colwise="multi_head_attention.Wq multi_head_attention.Wk multi_head_attention.Wv ffn.0")
    | _at("h.*", rowwise="multi_head_attention.dense ffn.2"),
    "xglm biogpt": _XGLM,
    "bart mbart blenderbot blenderbot-small marian pegasus plbart whisper": _BART,
    "mvp": _decoder("decoder.layers.*", "num_heads embed_dim"),
    "musicgen_decoder musicgen_melody_decoder": _BART,
    "bigbird_pegasus": _BART,
    "trocr": _whole("decoder.layers.*.self_attn", _QKV, "out_proj")
    | _whole("decoder.layers.*.encoder_attn", _QKV, "out_proj")
    | _at("decoder.layers.*", colwise="fc1", rowwise="fc2"),
    "prophetnet": _whole("decoder.layers.*.self_attn", "query_proj key_proj value_proj", "out_proj")
    | _whole("decoder.layers.*.cross_attn", "query_proj key_proj value_proj", "out_proj")
    | _at("decoder.layers.*.feed_forward", colwise="intermediate", rowwise="output"),
    "modernbert-decoder": _counts("layers.*.attn", "num_heads all_head_size")
    | _at("layers.*.attn", colwise=_QKV, rowwise="Wo")
    | _at("layers.*.mlp", packed_colwise="Wi", rowwise="Wo"),
    "moshi": _counts("layers.*.self_attn", "num_heads num_key_value_heads")
    | _at("layers.*.self_attn", colwise="q_proj.linear k_proj.linear v_proj.linear", rowwise="o_proj.linear")
    | _at("layers.*.mlp", packed_colwise="fc1", rowwise="fc2"),
    "emu3_text_model": _LLAMA,
    "fuyu": _inside("language_model", _PERSIMMON),
    "big_bird": _BERT,
    "git": _BERT,
    "got_ocr2": _inside("language_model", _LLAMA),
    "mllama_text_model": _counts("layers.*.cross_attn", "num_heads num_key_value_heads", replicates=True)
    | _counts("layers.*.self_attn", "num_heads num_key_value_heads", replicates=True)
    | _LLAMA
    | _at("layers.*.cross_attn", colwise=_QKV, rowwise="o_proj", **{_SUMMED: "q_norm k_norm"}),
    "cpmant": _whole(
        "encoder.layers.*.self_att.self_attention", "project_q project_k project_v", "attention_out"
    )
    | _at("encoder.layers.*.ffn.ffn", colwise="w_in.w_0 w_in.w_1", rowwise="w_out"),
    "xlm": _counts("attentions.*", "n_heads")
    | _at("attentions.*", colwise="q_lin k_lin v_lin", rowwise="out_lin")
    | _at("ffns.*", colwise="lin1", rowwise="lin2"),
    "blt": _inside("local_encoder", _BLT)
    | _inside("global_transformer", _BLT)
    | _inside("local_decoder", _BLT)
    | _inside("patcher", _BLT),
    "zamba": _at("layers.*.shared_transf.self_attn", colwise=_QKV, rowwise="o_proj")
    | _at("layers.*.shared_transf.feed_forward", colwise="gate_proj up_proj", rowwise="down_proj"),
    "zamba2": _at("layers.*.shared_transformer.self_attn", colwise=_QKV, rowwise="o_proj")
    | _at(
        "layers.*.shared_transformer.self_attn",
        colwise="linear_q_adapter_list.*.1 linear_k_adapter_list.*.1 linear_v_adapter_list.*.1",
    )
    | _at("layers.*.shared_transformer.feed_forward", packed_colwise="gate_up_proj", rowwise="down_proj")
    | _at("layers.*.shared_transformer.feed_forward", packed_colwise="gate_up_proj_adapter_list.*.1"),
    "zaya": {"layers.*.mlp.experts": "moe_tp_experts"}
    | _at("layers.*.mlp.experts", packed_colwise="gate_up_proj", rowwise="down_proj")
    | _whole("layers.*.self_attn", "qkv_proj.q_proj qkv_proj.k_proj", "o_proj"),
    "reformer": _at("encoder.layers.*.feed_forward", colwise="dense.dense", rowwise="output.dense"),
    # Hybrids: only attention and the feed forward are split, state-space layers are replicated.
    "bamba falcon_h1": _at("layers.*.self_attn", colwise=_QKV, rowwise="o_proj")
    | _at("layers.*.feed_forward", colwise="gate_proj up_proj", rowwise="down_proj"),
    "recurrent_gemma": _at("layers.*.temporal_block", colwise=_QKV, rowwise="o_proj")
    | _at("layers.*.mlp_block", colwise="gate_proj up_proj", rowwise="down_proj"),
    "bert roberta camembert xlm-roberta data2vec-text electra ernie megatron-bert": _BERT,
    "rembert roberta-prelayernorm xlm-roberta-xl roc_bert roformer xmod bert-generation": _BERT,
    "xlnet": _at("layer.*.ff", colwise="layer_1", rowwise="layer_2"),
    # These replace rows of transformers that compute something else:
    "apertus": {"layers.*.mlp.act_fn": _SUMMED},
    "doge": {"layers.*.self_attn.A": "colwise", "layers.*.self_attn.dt_proj": "rowwise_slice_output"}
    | _at("layers.*.self_attn", **{_SUMMED: "q_norm k_norm"}),
    # Keeps only the largest activations of a layer, and needs all of them for that.
    "gemma3n_text": _whole("layers.*.mlp", "gate_proj up_proj", "down_proj"),
    "inkling_text": _INKLING | {"embed_tokens.embed_norm": _SUMMED},
    "inkling2_text": _INKLING,
}

# Model type -> cases; all cases that match the config are merged.
PLANS: dict[str, tuple[ConfigCase, ...]] = {
    name: plan if isinstance(plan, tuple) else (ConfigCase(plan),)
    for names, plan in _PLANS.items()
    for name in names.split()
}

# Model types without a plan, and why.
_RECURRENT = "its layers are recurrent along the sequence, which tensor parallelism does not support"
WITHOUT_PLAN = {name: _RECURRENT for name in ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")}

# Model types whose blocks, outside of their submodules, need whole sequences, and why.
_STREAMS = "their blocks mix several residual streams (hyper-connections)"
_PER_LAYER = "their blocks add a per-layer embedding of each token"
_EMBEDDINGS = "their blocks concatenate the embeddings with the output of the previous block"
WITHOUT_SEQUENCE: dict[str, str] = {
    "deepseek_v4": _STREAMS,
    "hy_v4": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "gemma3n_text": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "hrm_text": "its blocks run several times, each time with a different state added",
    "inkling2_text": "its blocks use the outputs of several earlier blocks",
    "zamba": _EMBEDDINGS,
    "zamba2": _EMBEDDINGS,
    "zaya": "the residuals of its blocks are added in modules with weights",
    "xlm": "it has no blocks: its attention, feed-forward and norm layers are in three separate lists",
    "xlnet": "its activations are [sequence, batch, hidden]",
    "reformer": "its blocks are reversible and operate on two streams",
    "blt": "some of its blocks operate on bytes, others on patches of bytes",
    "git": "its blocks process image patches together with the tokens",
    "gpt_neox_japanese": "its attention returns a bias that is added outside the attention",
}
