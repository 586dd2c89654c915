"""Tables of the zoo: which types there are, and what each needs to be tiny and to train (data).

Degrees 2 and 4 of tensor parallelism divide heads, key-value heads, widths and experts, but where it is the nature of a
family that they do not (one key-value head for all queries). The vocabulary is odd.
"""

from __future__ import annotations

from typing import Any

KNOWN_AT = "5.23.0"  # the version of transformers that has these types
NAMES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2
cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32
deepseek_v4 diffllama doge dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4
exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama
llama4 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3
minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi
moss_transcribe_diarize mpt musicgen musicgen_melody mvp nanochat nemotron nemotron_h olmo olmo2 olmo3
olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet qwen2
qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp
qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss
smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet
xlstm xmod youtu zamba zamba2 zaya
"""
KNOWN = NAMES.split()

# type -> why nothing can be trained here
UNRUNNABLE = {
    "gemma3n": "its image tower needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": "drafts tokens from another model's keys and values: takes no tokens and has no loss",
    "gemma4_unified_assistant": "drafts tokens from another model's keys and values: takes no tokens and has no loss",
}

VOCAB, WIDTH, PATCHES = 71, 64, 5


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# What a config class gets if it has a field of that name.
SIZES: dict[str, Any] = {
    **_each("hidden_size n_embd d_model emb_dim embedding_dim lru_width cross_attention_hidden_size", WIDTH),
    **_each("hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size", WIDTH),
    **_each("embedding_size input_embedding_size word_embed_proj_dim", 32),
    "output_embedding_size": 48,
    **_each("router_hidden_size downsample_hidden_size", 16),
    **_each("num_hidden_layers n_layer n_layers num_layers num_blocks", 2),
    **_each("encoder_layers decoder_layers num_encoder_layers num_decoder_layers", 2),
    **_each("num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads", 8),
    **_each("encoder_attention_heads decoder_attention_heads", 8),
    **_each("num_encoder_attention_heads num_decoder_attention_heads", 8),
    **_each("num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads", 4),
    **_each("head_dim dim_head d_head attention_head_size kv_channels swa_head_dim", 8),
    **_each("sliding_window window_size attention_window_size sliding_window_size attention_chunk_size", 8),
    **_each("local_attention", 16),
    "rotary_dim": 4,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    **_each("qk_rope_head_dim v_head_dim", 8),
    **_each("index_n_heads index_topk", 4),
    "index_head_dim": 16,
    # feed forward
    **_each("intermediate_size n_inner ffn_dim d_inner dim_ff dff feed_forward_size mlp_dim", 96),
    **_each(
        "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp dense_intermediate_size", 96
    ),
    **_each("moe_intermediate_size expert_ffn_hidden_size", 32),
    **_each("shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size", 32),
    "moe_shared_expert_intermediate_size": 32,
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **_each("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k", 2),
    **_each("num_shared_experts n_shared_experts moe_num_shared_experts", 1),
    **_each("n_group topk_group num_expert_group first_k_dense_replace num_dense_layers", 1),
    # noise would draw random numbers in forward; without it phimoe's router has gradients of zero
    **_each("router_jitter_noise input_jitter_noise", 0.0),
    # linear attention and state spaces
    **_each("linear_num_key_heads n_groups", 4),
    **_each("linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads", 8),
    **_each("linear_head_dim linear_key_head_dim linear_value_head_dim", 8),
    **_each("mamba_d_head mamba_head_dim mamba_headdim", 16),
    **_each("mamba_d_state ssm_state_size state_size chunk_size mamba_chunk_size block_size", 8),
    **_each("mamba_dt_rank time_step_rank", 4),
    # vocabulary and positions
    **_each("vocab_size decoder_vocab_size vocab_size_per_layer_input", VOCAB),
    **_each("pronunciation_vocab_size shape_vocab_size", VOCAB),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len context_length", 64),
    **_each("max_target_positions max_source_positions model_max_length", 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    **_each("eos_token_id decoder_start_token_id", 2),
    # other
    **_each("initializer_range init_std", 0.15),
    "is_decoder": True,
    "use_cache": False,
}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# type -> fields that differ from SIZES; of parts of a model (an image tower) too, by the type of the part
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {  # a threshold among the entropies: patches of several lengths
        "patching_threshold": 3.8,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
    },
    "codegen": {"n_head": 16},  # its heads lie in four parts
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": ROPE | {"mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 4,
        "o_lora_rank": 8,
        "hc_mult": 2,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "fuyu": {"image_size": 8, "patch_size": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_unified_text": {"global_head_dim": 16},
    "git_vision_model": {"image_size": 8, "patch_size": 4},
    "got_ocr2_vision": {"image_size": 32, "patch_size": 16, "output_channels": 8, "window_size": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_text": {"vocab_size": VOCAB + 4, "unpadded_vocab_size": VOCAB, "d_rel": 8, "rel_extent": 16},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "d_rel": 8, "rel_extent": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [8, 4],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"moe_layers": [1], "no_rope_layers": [1, 0]},
    "longcat_flash": {"zero_expert_num": 4},
    "mamba2": {"head_dim": 16},
    "mellum": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16,
        "nemo_conv_channels": 16,
    },
    "phi4_multimodal_vision": {"image_size": 28, "crop_size": 28},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "hash_seed": 0,
        "num_buckets": 4,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
# types whose config has the trained part under this name
PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# what a batch has besides input_ids and labels: name -> types
EXTRAS = {
    "encoder_hidden_states": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen mvp pegasus "
    "plbart prophetnet trocr",
    "encoder_outputs": "whisper",
    "cross_attention_states": "mllama",
    "pixel_values": "git",
    "input_shape_ids": "roc_bert",
    "input_pronunciation_ids": "roc_bert",
}
# How logits become the loss. Types that are not here hand what the head gives, as it is, to `model.loss_function`.
ROUTES = {
    "elementwise, then loss_function": "beam cohere cohere2 cohere2_moe cohere_compass_text falcon_h1 gemma2 "
    "gemma3n_text granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hyperclovax nanochat "
    "recurrent_gemma vaultgemma xlstm",
    "elementwise, a slice of the vocabulary, then loss_function": "inkling2_text",
    "a slice of the sequence, then loss_function with shift_labels": "git",
    "CrossEntropyLoss in forward, on a view of config.vocab_size columns": "bart bigbird_pegasus blenderbot "
    "blenderbot-small marian mbart mvp pegasus plbart trocr whisper",
    "CrossEntropyLoss in forward": "cpmant xlm xlnet",
    "CrossEntropyLoss in forward, for each of several heads": "musicgen musicgen_melody",
    "log_softmax in forward": "prophetnet",
}
CODEBOOKS = {"musicgen": 4, "musicgen_melody": 4}
