"""Obsolete JSON is converted, each change is reported under the original key, and nothing else changes."""

from typing import Any

import pytest

from launcher.config import ConfigProblems, load
from launcher.config.conversions import DROPPED, RENAMED, convert
from launcher.config.document import Rewriter
from launcher.config.source import read

OFFLOAD_CPU = {"device": "cpu"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
    ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
    (
        {"zero_optimization": True, "allgather_size": 7},
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 7}},
    ),
    ({"zero_optimization": {"stage": 2}, "allgather_size": 7}, {"zero_optimization": {"stage": 2}}),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    ),
    ({"zero_optimization": {"cpu_offload": False}}, {"zero_optimization": {}}),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
        {"zero_optimization": {"stage": 3, "offload_param": OFFLOAD_CPU}},
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
        {"zero_optimization": {"stage": 3, "offload_param": OFFLOAD_CPU}},
    ),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, {"zero_optimization": {}}),
    (
        {"zero_optimization": {"aio": {"thread_count": 2}}},
        {"zero_optimization": {}, "aio": {"intra_op_parallelism": 2}},
    ),
    ({"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, {"bf16": {"enabled": True}}),
    ({"fp16": {"enabled": True, "opt_level": "O2"}}, {"fp16": {"enabled": True}}),
    ({"fp16": {"fp16": True}}, {"fp16": {"enabled": True}}),
    ({"fp16": {"fp16": True, "enabled": False}}, {"fp16": {"enabled": False}}),
    ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
    ({"fp32_allreduce": False}, {}),
    ({"checkpoint_activations": True}, {"activation_checkpointing": {}}),
    ({"checkpoint_activations": False, "cuda_visible_devices": "0"}, {}),
    ({"communication_data_type": "torch.bfloat16"}, {"communication_data_type": "bf16"}),
    ({"amp": {"enabled": False, "opt_level": "O1"}}, {}),
    ({"amp": {"enabled": "auto", "opt_level": "auto"}}, {}),
    (
        {"amp": {"enabled": True, "opt_level": "O1"}},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    ),
    ({"amp": {"enabled": True, "opt_level": "O2"}}, {"fp16": {"enabled": True}}),
    (
        {
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 1e-4, "freeze_step": 400, "cuda_aware": False},
            }
        },
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}},
    ),
    ({"optimizer": {"type": "OneBitLamb"}}, {"optimizer": {"type": "Lamb"}}),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}},
        {"optimizer": {"type": "AdamW", "params": {}}, "gradient_clipping": 0.5},
    ),
    ({"monitor_config": {"wandb": {"enabled": False}}}, {"wandb": {"enabled": False}}),
    ({"curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}}, {}),
    ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}}}}, {}),
    ({"seed": 1, "disable_allgather": True, "sparse_gradients": True}, {}),
]


@pytest.mark.parametrize(("old", "new"), CASES, ids=lambda tree: str(tree)[:60])
def test_old_keys_become_todays(old: dict[str, Any], new: dict[str, Any]) -> None:
    document = convert(read(old))
    assert document.tree == new
    assert not document.problems
    written = {note.path[0] for note in document.conversions}
    assert written and written <= set(old)
    again = convert(read(new))
    assert again.tree == new and not again.conversions


def test_the_old_curriculum_is_the_metric_seqlen() -> None:
    pace = {"total_curriculum_step": 10, "difficulty_step": 8}
    old = {
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": pace,
    }
    text = read({"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **old}})
    sampling = convert(text).tree["data_efficiency"]["data_sampling"]
    metric = sampling["curriculum_learning"]["curriculum_metrics"]["seqlen"]
    assert metric == {"difficulty_type": "value", "clustering_type": "single_cluster", **old}


def test_both_names_of_one_key_are_a_problem_unless_they_agree() -> None:
    with pytest.raises(ConfigProblems, match=r"bfloat16: is an old name of `bf16`, and both are written"):
        load({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    params = {"type": "AdamW", "params": {"max_grad_norm": 0.5}}
    assert load({"optimizer": params, "gradient_clipping": 0.5}).gradient_clipping == 0.5
    with pytest.raises(ConfigProblems, match=r"optimizer\.params\.max_grad_norm: is an old name"):
        load({"optimizer": params, "gradient_clipping": 1.0})
    with pytest.raises(ConfigProblems, match="is set together with `zero_optimization"):
        load({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}})


def test_a_mistake_in_a_converted_key_is_reported_where_it_was_written() -> None:
    text = '{\n "bfloat16": {"enabled": true,\n  "check_grad_overflo": false}}'
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="f")
    assert "f:3:3 bfloat16.check_grad_overflo (now bf16.check_grad_overflo): unknown key" in str(caught.value)


def test_a_typo_in_a_section_that_would_be_left_out_is_an_error() -> None:
    for section in ("amp", "curriculum_learning"):
        with pytest.raises(ConfigProblems, match=rf"did you mean `{section}\.enabled`"):
            load({section: {"enabeld": False}})


def test_a_file_that_is_migrated_keeps_its_order() -> None:
    tree = {"a": 1, "bfloat16": {"enabled": True}, "z": {}}
    assert list(convert(read(tree)).tree) == ["a", "bf16", "z"]
    assert list(tree) == ["a", "bfloat16", "z"]


@pytest.mark.parametrize("path", [*RENAMED, *DROPPED])
def test_every_line_of_the_tables_fires(path: str) -> None:
    tree: Any = 1
    for key in reversed(path.split(".")):
        tree = {key: tree}
    document = convert(read(tree))
    assert not Rewriter(document).has(path)
    assert any(note.path == tuple(path.split(".")) for note in document.conversions)
