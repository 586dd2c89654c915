"""`launch --config accelerate.yaml`: files from `accelerate config` have the same meaning as in accelerate."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli import accelerate_flags, hugging_face
from launcher.cli.launch_flags import launch_parser
from launcher.cli.main import _source, main
from launcher.config.root import load
from launcher.config.source import read
from launcher.errors import ConfigError

SECTION = {
    "gradient_accumulation_steps": 4,
    "offload_optimizer_device": "none",
    "offload_param_device": "cpu",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
ONE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": SECTION,
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2, "use_cpu": True, "downcast_bf16": "no",
    "main_training_function": "main", "machine_rank": 0, "rdzv_backend": "static", "same_network": True,
}  # fmt: skip
TWO = {
    "num_machines": 2, "num_processes": 16, "machine_rank": 1, "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
}  # fmt: skip


def written(directory: Path, **changes: Any) -> str:
    """Return the path of a YAML; a value of None removes a key."""
    tree = {key: value for key, value in {**ONE, **changes}.items() if value is not None}
    path = directory / "accelerate.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def flags_of(path: str, *more: str) -> Any:
    flags = launch_parser().parse_args(["--config", path, *more])
    accelerate_flags.take(flags)
    return flags


def test_the_json_is_the_one_that_accelerate_builds(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read(path).tree == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
    }
    assert load(path).bf16.enabled is True
    assert json.loads(base64.urlsafe_b64decode(_source(path))) == read(path).tree


def test_a_json_that_it_names_is_read_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 6, "zero_optimization": {"stage": 1}}')
    named = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    path = written(tmp_path, deepspeed_config=named, mixed_precision=None)
    assert load(path).train_batch_size == 6
    with pytest.raises(
        ConfigError, match="zero_stage, mixed_precision cannot be combined with deepspeed_config_file"
    ):
        read(written(tmp_path, deepspeed_config={**named, "zero_stage": 2}))


def test_machines_become_flags_and_flags_win(tmp_path: Path) -> None:
    one = flags_of(written(tmp_path))
    assert (one.num_gpus, one.device, one.num_nodes, one.no_ssh) == (2, "cpu", None, False)
    assert flags_of(written(tmp_path), "--num_gpus", "1").num_gpus == 1
    chosen = flags_of(written(tmp_path, gpu_ids="1,3", use_cpu=False))
    assert (chosen.include, chosen.device) == ("localhost:1,3", "auto")


@pytest.mark.parametrize(
    "more", [{}, TWO | {"deepspeed_config": {**SECTION, "deepspeed_multinode_launcher": "standard"}}]
)
def test_affinity_binds_ranks_to_cores(tmp_path: Path, more: dict[str, Any]) -> None:
    assert flags_of(written(tmp_path, enable_cpu_affinity=True, **more)).bind_cores_to_rank is True
    assert flags_of(written(tmp_path, enable_cpu_affinity=False, **more)).bind_cores_to_rank is False
    assert flags_of(written(tmp_path, **more)).bind_cores_to_rank is False
    with pytest.raises(ConfigError, match="enable_cpu_affinity is the string"):
        flags_of(written(tmp_path, enable_cpu_affinity="numa", **more))


def test_several_machines_start_the_same_command_or_have_a_hostfile(tmp_path: Path) -> None:
    standard = written(
        tmp_path, **TWO, deepspeed_config={**SECTION, "deepspeed_multinode_launcher": "standard"}
    )
    flags = flags_of(standard)
    assert (flags.num_gpus, flags.num_nodes, flags.node_rank, flags.no_ssh) == (8, 2, 1, True)
    assert (flags.master_addr, flags.master_port) == ("10.0.0.1", 29501)
    by_pdsh = {**SECTION, "deepspeed_hostfile": "hosts", "deepspeed_inclusion_filter": "a@b"}
    flags = flags_of(written(tmp_path, **TWO, deepspeed_config=by_pdsh))
    assert (flags.launcher, flags.hostfile, flags.include, flags.no_ssh) == ("pdsh", "hosts", "a@b", False)


def test_the_script_is_told_what_accelerates_launcher_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    found = hugging_face.variables(written(tmp_path))
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert found["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"
    told = json.loads(base64.urlsafe_b64decode(found["ACCELERATE_DEEPSPEED_CONFIG_FILE"]))
    assert told["zero_optimization"]["stage"] == 3


def test_float8_is_the_engines(tmp_path: Path) -> None:
    """accelerate gets bf16, or it would convert the model itself."""
    keys = {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}
    path = written(tmp_path, mixed_precision="fp8", fp8_config=keys)
    tree = read(path).tree
    assert tree["bf16"] == {"enabled": True} and tree["fp8"] == {"enabled": True, "all_gather": False}
    assert hugging_face.variables(path)["ACCELERATE_MIXED_PRECISION"] == "bf16"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"distributed_type": "FSDP"}, 'unsupported distributed_type: "FSDP"'),
    "fsdp section": ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config configures another engine"),
    "typo": ({"num_procesess": 2}, "did you mean num_processes"),
    "typo inside": ({"deepspeed_config": {"zero_stages": 2}}, "did you mean zero_stage"),
    "compiled": ({"dynamo_backend": "INDUCTOR"}, "dynamo_backend configures another engine"),
    "precision": ({"mixed_precision": "fp4"}, "write one of no, bf16, fp16, fp8"),
    "backend of float8": ({"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}}, "write AO"),
    "key of float8": (
        {"mixed_precision": "fp8", "fp8_config": {"margin": 2}},
        'unknown accelerate key "margin"',
    ),
    "cloud": ({"compute_environment": "AMAZON_SAGEMAKER"}, "LOCAL_MACHINE"),
    "uneven": ({**TWO, "num_processes": 15}, "not a multiple"),
    "not a number": ({"num_processes": "two"}, "whole number"),
    "runner": (
        {**TWO, "deepspeed_config": {**SECTION, "deepspeed_multinode_launcher": "slurm"}},
        "--launcher slurm",
    ),
    "no section": ({"deepspeed_config": 3}, "deepspeed_config must be a section, not 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_here_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = WRONG[case]
    path = written(tmp_path, **changes)
    assert main(["--config", path, "--dry_run", "pretrain"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "accelerate.yaml" in error, error


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "&a [*a]", "? {a: 1}\n: 2", "\x00", "a: &x 1\nb: *y"])
def test_garbage_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read(path)
