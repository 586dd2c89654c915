"""`launch memory-estimate` as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import load

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
ASKED = [
    "memory-estimate",
    "--config",
    str(DS_CONFIGS / "zero3.json"),
    "--model",
    "default",
    "--seq-length",
    "64",
]


def test_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--num-gpus", "8", "--gpu", "4GiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (rank,) = told["per_rank"]
    assert told["fits"] is True and told["inputs"]["num_gpus"] == 8
    states = rank["parameters_bytes"] + rank["gradients_bytes"] + rank["optimizer_bytes"]
    assert rank["model_states_bytes"] == states
    assert rank["peak_bytes"] == max(rank["phases"].values()) > states
    assert rank["host_bytes"] == rank["nvme_bytes"] == 0
    assert main([*ASKED, "--num-gpus", "8", "--dry-run", "--json"]) == 0
    (played,) = json.loads(capsys.readouterr().out)["per_rank"]
    assert played["optimizer_bytes"] == rank["optimizer_bytes"]
    assert played["peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.01)


def test_a_run_that_does_not_fit_is_told_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--gpu", "10MiB"]) == 1
    assert "does NOT fit" in capsys.readouterr().out


def test_stages_are_told_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, hosts = tmp_path / "ds.json", tmp_path / "hosts"
    tree = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, "optimizer": {"type": "AdamW"}}
    config.write_text(json.dumps(tree))
    hosts.write_text("one slots=2\ntwo slots=2\n")
    picture = tmp_path / "ranks.svg"
    asked = ["memory-estimate", "--config", str(config), "--model", "default", "--seq-length", "64"]
    assert main([*asked, "--hostfile", str(hosts), "--plot", str(picture), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["inputs"]["num_gpus"] == 4 and [one["rank"] for one in told["per_rank"]] == [0, 2]
    drawn = picture.read_text()
    assert drawn.count("<svg") == 1 and "rank 2" in drawn and "activations" in drawn
    assert main([*asked, "--hostfile", str(hosts), "--num-gpus", "4"]) == 2
    assert "not allowed with argument -H/--hostfile" in capsys.readouterr().err


def test_experts_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"size": 2}}))
    asked = ["memory-estimate", "--config", str(config), "--model", "default-moe", "--num-gpus", "2"]
    peaks = []
    for more in ("1", "1.5"):
        assert main([*asked, "--seq-length", "64", "--expert-load", more, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["per_rank"][0]["peak_bytes"])
    assert peaks[0] < peaks[1]
    assert main([*asked, "--seq-length", "64", "--expert-load", "1.5"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "each rank has 8 of 16 in each of 6 layers" in told and "1.5 times an even share" in told
    assert main([*asked, "--expert-load", "0"]) == 2
    assert "needs a number of at least 1" in capsys.readouterr().err


def test_all_ways_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--num-gpus", "8", "--gpu", "4GiB", "--compare", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["compare"]}
    states = [rows[f"stage {stage}"]["model_states_bytes"] for stage in range(4)]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4
    assert rows["stage 3, optimizer on the host"]["host_bytes"] > 0 == rows["stage 3"]["host_bytes"]
    assert rows["stage 3, all on NVMe"]["nvme_bytes"] > rows["stage 3, all on NVMe"]["host_bytes"]
    assert all(row["fits"] for row in rows.values())
    assert main([*ASKED, "--num-gpus", "8", "--gpu", "4GiB", "--compare"]) == 0
    assert "stage 3, all on the host" in capsys.readouterr().out


def test_advice_is_the_cheapest_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    tree = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "train_batch_size": 16}
    config.write_text(json.dumps(tree))
    asked = ["memory-estimate", "--config", str(config), "--model", "default", "--seq-length", "64"]

    def advised(tensors: int) -> list[str] | None:
        beside = 400 + 688  # CUDA's context, and NCCL's buffers of one group
        main([*asked, "--num-gpus", "8", "--gpu", f"{tensors + beside}MiB", "--reserve", "0", "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["fits"] is False
        advice: list[str] | None = told["advice"]
        return advice

    assert advised(115) == ['"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2']
    (stage,) = advised(80) or []
    assert "zero_optimization.stage" in stage
    assert advised(1) is None


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--num-gpus", "2", "--rank", "2"]) == 2
    assert "--rank 2 is out of range: the number of ranks is 2" in capsys.readouterr().err
    for wrong in ("1.5", "-1%", "much"):
        assert main([*ASKED, "--reserve", wrong]) == 2
    assert "--reserve" in capsys.readouterr().err


def test_without_a_configuration_one_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["memory-estimate", "--model", "default", "--num-gpus", "4", "--seq-length", "256"]
    assert main([*asked, "--gpu", "h100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    config = load(told["proposed"])
    assert told["fits"] and config.dp_degree(4) >= 1 and len(told["per_rank"]) >= 1
    for gpu in ([], ["--gpu", "80GiB"]):  # how fast it is, bytes do not say
        assert main([*asked, *gpu]) == 2
        assert "missing --config" in capsys.readouterr().err
    assert main([*asked, "--gpu", "h100", "--reserve", "0.999"]) == 2
    assert "no layout fits on 4 x" in capsys.readouterr().err


def test_adapters_are_asked_for_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--lora", "4", "--json"]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    assert 0 < inputs["trained_parameters"] < inputs["parameters"] / 10
    assert main([*ASKED, "--lora-targets", "q_proj"]) == 2
    assert "--lora-targets requires --lora" in (err := capsys.readouterr().err) and "--lora 16" in err
    assert main(["memory-estimate", "--model", "default", "--gpu", "h100", "--lora", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and "tensor_parallel" not in told["proposed"]


def test_the_json_is_watched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every save is estimated; a mistake is reported, and the next save is estimated again."""
    file, beside = tmp_path / "ds.json", tmp_path / "saved.json"
    file.write_text((DS_CONFIGS / "zero3.json").read_text())

    def replace_file(text: str) -> None:  # as editors do: the file is never incomplete
        beside.write_text(text)
        beside.replace(file)

    saves = [
        lambda: None,
        lambda: replace_file((DS_CONFIGS / "zero2.json").read_text()),
        lambda: replace_file('{"zero_optimization": {"stage": 9}}'),
        file.unlink,
        lambda: file.write_text((DS_CONFIGS / "zero3.json").read_text()),
    ]

    def sleep(seconds: float) -> None:
        if not saves:
            raise KeyboardInterrupt
        saves.pop(0)()

    monkeypatch.setattr("launcher.cli.watch.time.sleep", sleep)
    asked = [argument if argument != ASKED[2] else str(file) for argument in ASKED]
    assert main([*asked, "--num-gpus", "8", "--gpu", "4GiB", "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("rank 0 of 8") == 3 and printed.out.count("waiting for changes of") == 5
    assert printed.err.count("error:") == 2 and "stage" in printed.err and "ds.json" in printed.err
    first, second, *_ = printed.out.split("----")[::2]
    assert first != second
    assert main(["memory-estimate", "--model", "default", "--watch"]) == 2
    assert "--watch requires --config" in capsys.readouterr().err
