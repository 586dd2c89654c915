"""`launch check`: every key gets its verdict quickly, without torch."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from launcher.cli.check import check
from tests.cli.test_main import answer

OLD = """{
  // what a trainer wrote years ago
  "train_micro_batch_size_per_gpu": "auto",
  "train_batch_size": 32,
  "gradient_accumulation_steps": 2,
  "_comment": "from the cluster",
  "bf16": {"enabled": true, "loss_scale": 0},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "round_robin_gradients": true,
    "stage3_gather_fp16_weights_on_model_save": true},
  "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": 0.1, "max_grad_norm": 1.0}},
  "amp": {"enabled": false, "opt_level": "O1"},
  "steps_per_print": Infinity
}"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(OLD)
    return path


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = check(argv)
    return code, capsys.readouterr().out


def test_a_verdict_for_every_key(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, str(old))
    lines = [line.split(None, 1) for line in text.splitlines()[1:]]
    assert code == 0
    assert "16 keys: 9 used, 4 obsolete, 1 used differently, 1 no effect, 1 comment" in text.splitlines()[0]
    verdicts = {" ".join(line[1].split()[:2]).rstrip(":"): line[0] for line in lines if line[0] == "obsolete"}
    assert set(verdicts) == {
        "7:29 bf16.loss_scale",
        "9:5 zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "10:79 optimizer.params.max_grad_norm",
        "11:3 amp",
    }
    assert "no effect          8:64  zero_optimization.round_robin_gradients: has no effect here" in text
    assert 'used differently  10:17  optimizer.type: "Adam" decays weights as AdamW does' in text
    assert "comment             6:3  _comment: is treated as a comment" in text


def test_the_members_of_a_renamed_section_have_their_own_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(
        '{"bfloat16": {"enabled": true, "loss_scale": 0}, "datastates_ckpt": {"host_cache_size": 16},'
        ' "optimizer": {"type": "Adam", "params": {"betas": [0.9, "x"]}}, "gradient_clipping": 1}'
    )
    code, text = shown(capsys, str(path))
    assert code == 1
    *rows, title, plain = text.splitlines()[1:]
    assert [(row.split()[0], row.split()[2].rstrip(":")) for row in rows] == [
        ("obsolete", "bfloat16"),
        ("obsolete", "bfloat16.loss_scale"),
        ("refused", "datastates_ckpt"),
        ("refused", "optimizer.params.betas[1]"),
    ]
    assert title == "as written:"
    assert plain.split(", ") == ["  bfloat16.enabled", "optimizer.type", "gradient_clipping"]


def test_a_section_that_nobody_reads_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"data": {"path": "x", "columns": {"text": 1}}, "_note": "mine"}')
    code, text = shown(capsys, str(path))
    assert code == 0 and "own.json: 2 keys: 1 comment, 1 foreign" in text
    assert "data.path" not in text


def test_a_key_without_effect_is_named_at_any_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "idle.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2, "contiguous_gradients": true}, "zero_force_ds_cpu_optimizer": true}'
    )
    _, text = shown(capsys, str(path))
    assert "3 keys: 1 used, 2 no effect" in text


def test_a_batch_that_fits_no_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch.json"
    micro, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    for batch, unit in (({micro: 2, steps: 2}, 4), ({micro: 2}, 2), ({steps: 3}, 3)):
        path.write_text(json.dumps({"train_batch_size": 7, **batch}))
        code, text = shown(capsys, str(path))
        assert code == 1
        assert (
            f"= {unit}: no number of ranks satisfies the batch equation; write a multiple of {unit}" in text
        )
    path.write_text(json.dumps({"train_batch_size": 8, micro: 2, steps: "auto"}))
    assert shown(capsys, str(path))[0] == 0


def test_all_refusals_at_once_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(
        '{"train_batch_sze": 8,\n "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},\n'
        ' "nebula": {"enabled": true}, "gradient_clipping": "much"}'
    )
    code, text = shown(capsys, str(path))
    assert code == 1
    refused = [line.split()[1:3] for line in text.splitlines() if line.startswith("  refused")]
    assert refused == [
        ["1:2", "train_batch_sze:"],
        ["2:58", "zero_optimization.offload_optimizer.device:"],
        ["3:13", "nebula.enabled:"],
        ["3:31", "gradient_clipping:"],
    ]
    assert "zero_optimization.stage 0 does not shard it" in text
    assert "did you mean `train_batch_size`?" in text


def test_the_batch_equation_on_so_many_ranks(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}))
    assert shown(capsys, str(whole), "--num-gpus", "3")[0] == 0
    code, text = shown(capsys, str(whole), "--num-gpus", "5")
    assert code == 1
    assert "train_batch_size 12" in text and "data-parallel ranks 5" in text
    assert shown(capsys, str(old), "--num-gpus", "5")[0] == 0  # "auto": the run has a say


@pytest.mark.key("tensor_parallel.autotp_size")
def test_tensor_parallel_ranks_share_their_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tp.json"
    path.write_text(
        json.dumps(
            {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8, "gradient_accumulation_steps": 1}
        )
    )
    code, text = shown(capsys, str(path), "--num-gpus", "8", "--explain")
    assert code == 0 and "train_micro_batch_size_per_gpu 2 (from the batch equation)" in " ".join(
        text.split()
    )
    code, text = shown(capsys, str(path), "--num-gpus", "6")
    assert code == 1 and "data-parallel ranks 3" in text
    code, text = shown(capsys, str(path), "--num-gpus", "9")
    assert code == 1 and "autotp_size 2 does not divide the number of ranks, 9" in text
    assert "tp.json:1:22" in text and "write 1, 3 or 9, or start 2 ranks" in text


def test_explain_says_what_autos_and_defaults_become(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, str(old), "--explain", "--num-gpus", "4")
    autos, defaults = text.split('"auto" resolves to:')[1].split("not set, default used:")
    assert "train_micro_batch_size_per_gpu  4  (from the batch equation)" in autos
    assert "optimizer.params.lr" in autos and "0.001" in autos
    assert "fp16" in defaults and "off" in defaults
    assert "zero_optimization.overlap_comm" in defaults
    assert "bf16.check_grad_overflow" in defaults
    assert "reduce_bucket_size" not in defaults  # it is written


@pytest.mark.parametrize(
    ("sections", "ulysses", "ring"),
    [
        ({"sequence_parallel_size": 4}, "as many as the heads allow", "the rest"),
        ({"context_parallel": {"ring": "auto", "ulysses": 2}, "sequence_parallel_size": 4}, None, "2"),
        ({"context_parallel": {"ring": 2, "ulysses": 2}}, None, None),
    ],
)
def test_explain_says_what_shared_sequences_become(
    sections: dict[str, object],
    ulysses: str | None,
    ring: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **sections}))
    _, text = shown(capsys, str(path), "--num-gpus", "4", "--explain")
    told = dict(line.split(maxsplit=1) for line in text.splitlines() if "  (" in line)
    for key, wanted in (("ulysses", ulysses), ("ring", ring)):
        found = told.get(f"context_parallel.{key}")
        assert (
            found is None if wanted is None else found == f"{wanted}  (of the 4 ranks that share a sequence)"
        )
    assert told["tiled_loss"].startswith("true if the model supports it")
    if "sequence_parallel_size" not in sections:
        assert told["sequence_parallel_size"].startswith("4 ")


def test_migrate_writes_the_same_configuration_in_todays_keys(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.config import load

    new = tmp_path / "new.json"
    _, text = shown(capsys, str(old), "--migrate", str(new))
    assert "4 changes" in text
    assert load(new) == load(old)
    assert json.loads(new.read_text())["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    code, text = shown(capsys, str(new))
    assert code == 0 and "obsolete" not in text
    assert answer("check", str(old), "--migrate", str(new), cwd=tmp_path)[3].count("already exists") == 1


def test_migrate_tells_of_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    old.write_text('{\n  // one\n  "train_batch_size": 8, # two\n  /* three */ "fp16": {"enabled": false}}\n')
    _, text = shown(capsys, str(old), "--migrate", str(tmp_path / "new.json"))
    assert "comments are dropped, because JSON has none: see line 2, 3 of" in " ".join(text.split())


def test_check_is_light(old: Path, tmp_path: Path) -> None:
    code, seconds, text, _ = answer("check", str(old), "--explain", cwd=tmp_path)
    assert (
        code == 0 and seconds < 3
    )  # 0.3 s on an idle machine; that nothing heavy is imported is what is guarded
    assert "optimizer.params.max_grad_norm" in text
    assert answer("check", "--migrat", "x", str(old), cwd=tmp_path)[0] == 2
    code, _, text, _ = answer("check", "nothing.json", cwd=tmp_path)
    assert code == 1 and "does not exist" in text


def test_a_config_may_be_base64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stge": 2}})
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        code, told = shown(capsys, encode(text.encode()).decode())
        assert code == 1 and "the base64 config" in told and "did you mean `zero_optimization.stage`?" in told


def test_differences_are_told_where_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(stage: int, device: str, gather: bool) -> str:
        path = tmp_path / "ds.json"
        zero = {"stage": stage, "offload_optimizer": {"device": device, "nvme_path": "/x"}}
        zero["stage3_gather_16bit_weights_on_model_save"] = gather
        fp16 = {"enabled": True, "hysteresis": 2}
        path.write_text(json.dumps({"zero_optimization": zero, "fp16": fp16, "gradient_clipping": 1}))
        lines = shown(capsys, str(path))[1].splitlines()
        return " ".join(line for line in lines if "used differently" in line)

    assert "device" not in told(3, "nvme", True) + told(2, "cpu", True) and "device" in told(2, "nvme", True)
    assert "gather" in told(3, "cpu", False) and "gather" not in told(2, "cpu", False) + told(3, "cpu", True)
    assert "hysteresis" not in told(2, "cpu", True) and "hysteresis" in told(0, "none", True)
