"""DeepSpeed names that can be imported but raise an error when called.

Scripts import such names at the top and use them in a branch only. This module lists the names and creates
the class that stands for each; the reasons why they are not available are in `refused.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.integrations.refused import PACKAGE, NotHere, missing

_CALLS: Mapping[str, str] = {
    "": """
        DeepSpeedHybridEngine DualPipeVModule default_inference_config replace_transformer_layer""",
    "checkpoint": "DeepSpeedCheckpoint ZeROCheckpoint",
    "checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint",
    "checkpoint.ds_to_universal": "main",
    "checkpoint.universal_checkpoint": "load_hp_checkpoint_state",
    "inference": "DeepSpeedTPConfig InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine",
    "inference.config": "DeepSpeedInferenceConfig DeepSpeedTPConfig",
    "linear": "LoRAConfig OptimizedLinear QuantizationConfig",
    "module_inject": "replace_transformer_layer set_autotp_mode",
    "moe": "",
    "moe.ep_count": "count_tokens_per_expert",
    "moe.ep_experts": """
        ExpertActivation GroupedExperts apply_expert_activation apply_packed_expert_activation
        get_expert_activation register_expert_activation""",
    "moe.ep_kernels": """
        fill_indices_cpu fill_indices_wrapper gather_rows generate_permute_indices indices_padding_wrapper
        inverse_permutation permute_rows permute_rows_supported unpermute_rows""",
    "moe.ep_repack": "repack_expert_requires_grad_flags repack_expert_source_params repack_expert_weights",
    "moe.ep_router": "TokenChoiceTopKRouter",
    "moe.ep_tp_dispatch": """
        RestoreContext RoutedAssignmentPayload assert_tp_payload_consistent assignment_ordinals_by_expert
        average_gradient_over_tp dispatch_counters partition_assignments restore_combined""",
    "moe.experts": "Experts",
    "moe.fused_expert_layout": "FusedExpertLayout FusedLayout classify_fused_gate_up_layout",
    "moe.mappings": "drop_tokens gather_tokens",
    "moe.sharded_moe": """
        Base MOELayer TopKGate einsum exp_selection_uniform_map gumbel_map gumbel_rsample multiplicative_jitter
        uniform_map""",
    "runtime.data_pipeline.data_sampling.data_analyzer": "DataAnalyzer",
    "runtime.domino.transformer": "DominoTransformer",
    "runtime.hybrid_engine": "DeepSpeedHybridEngine",
    "runtime.sparse_tensor": "SparseTensor",
    "runtime.state_dict_factory": "SDLoaderFactory",
    "runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "sequence": """
        InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter SPModelInfo
        UlyssesSPViTAttention VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss auto_wrap_model_for_sp
        configure_vocab_parallel_loss detect_model_sp_info vocab_parallel_cross_entropy""",
    "sequence.auto_sp": "auto_wrap_model_for_sp",
    "sequence.autosp_detector": "SPModelInfo detect_model_sp_info",
    "sequence.autosp_fusion": "InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter",
    "sequence.autosp_vit": "UlyssesSPViTAttention",
    "sequence.cross_entropy": """
        VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss configure_vocab_parallel_loss
        validate_vocab_parallel_loss vocab_parallel_cross_entropy vocab_sequence_parallel_cross_entropy""",
    "sequence.fpdt_layer": """
        SequenceChunk apply_rotary_pos_emb_backward bias_gelu bias_gelu_back flash_attn_version
        update_out_and_lse""",
    "sequence.layer": """
        apply_rotary_pos_emb post_all2all pre_all2all_fun register_all_to_all_group uneven_heads_all2all""",
    "sequence.linear_cross_entropy": "vocab_parallel_linear_cross_entropy",
    "sequence.vocab_parallel_ops": "vocab_parallel_entropy vocab_parallel_kl_div vocab_parallel_logprobs",
    "utils.groups": "_create_expert_data_and_model_parallel",
}

ONLY_CALLS: Mapping[str, tuple[str, ...]] = {module: tuple(names.split()) for module, names in _CALLS.items()}
"""Module -> its names that can only be imported."""


def only_called(module: str, name: str) -> type | None:
    """Return a class for a name in `ONLY_CALLS`, which raises `NotHere` when called; None for other names."""
    if name not in ONLY_CALLS.get(module, ()):
        return None
    below = f"{module}.{name}" if module else name

    def refuse(cls: type, *args: Any, **keywords: Any) -> Any:
        what, how = missing(below)
        raise NotHere(what, **how)

    return _Refused(
        name, (), {"__new__": refuse, "__doc__": missing(below)[0], "__module__": f"{PACKAGE}.{module}"}
    )


class _Refused(type):
    """Metaclass of a class that is not available: accessing its attributes is an error, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what, how = missing(f"{cls.__module__.partition('.')[2]}.{cls.__name__}.{name}")
        raise NotHere(what, **how)
