"""`launch plan` and `launch bench device` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.cli.plan import default_batch
from launcher.config import load
from launcher.monitor.devices import device

PLAN = ["plan", "--model", "default", "--gpu", "a100", "--seq-length", "128", "--global-batch", "32"]


def test_the_first_choice_is_a_configuration_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, report, picture = tmp_path / "ds_config.json", tmp_path / "plan.html", tmp_path / "plan.svg"
    files = ["--write", str(written), "--html", str(report), "--plot", str(picture)]
    assert main([*PLAN, "--num-gpus", "4", *files]) == 0
    said = capsys.readouterr().out
    config = load(written)
    assert "4 x NVIDIA A100 SXM 80 GB, 32 sequences of 128 tokens a step" in said
    assert f"dp {config.dp_degree(4)}, ZeRO {config.zero_optimization.stage}" in said
    assert "Variations of the best layout" in said
    page = report.read_text()
    assert page.count("<svg") >= 2 and not re.search(r'(src|href)="(http|//)', page)
    assert "<svg" in picture.read_text()


def test_adapters_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    assert main([*PLAN, "--num-gpus", "4", "--lora", "8", "--top", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    inputs, (choice,) = found["inputs"], found["choices"]
    assert 0 < inputs["trained_parameters"] < inputs["parameters"] / 10
    assert (
        choice["layout"]["tp"] * choice["layout"]["pp"] * choice["layout"]["dp"] * choice["layout"]["cp"] == 4
    )
    assert main([*PLAN, "--num-gpus", "4", "--lora", "8", "--top", "1"]) == 0
    assert "M trained)" in capsys.readouterr().out
    assert main([*PLAN, "--num-gpus", "4", "--lora-targets", "q_proj"]) == 2
    assert "--lora 16" in capsys.readouterr().err


BILL = ["--tokens", "2B", "--price", "2.5", "--watts", "1000"]


def test_a_run_has_a_bill(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--num-gpus", "4", "--top", "1", *BILL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (choice,) = found["choices"]
    run, rate = choice["run"], 32 * 128 / choice["seconds"]
    assert found["inputs"]["tokens"] == 2e9
    assert run["hours"] == pytest.approx(2e9 / rate / 3600) and run["device_hours"] == 4 * run["hours"]
    assert run["money"] == pytest.approx(2.5 * run["device_hours"])
    assert run["kwh"] == pytest.approx(run["device_hours"])


def test_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--num-gpus", "4", "--top", "1", *BILL]) == 0
    assert "Training on 2,000,000,000 tokens takes" in (said := capsys.readouterr().out)
    assert "device-hours" in said and "at that price" in said and "kWh" in said
    assert main([*PLAN, "--num-gpus", "4", "--price", "2"]) == 2
    assert (
        "--price and --watts require --tokens" in (err := capsys.readouterr().err) and "--tokens 300B" in err
    )
    assert main([*PLAN, "--num-gpus", "4", "--tokens", "0B"]) == 2
    assert "above 0" in capsys.readouterr().err


def test_programs_get_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    assert main([*PLAN, "--hostfile", str(hosts), "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"]["devices"] == 4 and found["inputs"]["gpus_per_node"] == 2
    seconds = [choice["seconds"] for choice in found["choices"]]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    for choice in found["choices"]:
        assert sum(choice["parts"].values()) == pytest.approx(choice["seconds"])
        layout = choice["layout"]
        assert layout["tp"] * layout["pp"] * layout["dp"] == 4
        assert 0 < choice["peak_bytes"] < device("a100").memory


def test_where_nothing_fits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--num-gpus", "2", "--memory", "1026MiB"]) == 1
    assert "no layout fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gpu", "abacus"], "unknown GPU 'abacus'"),
        (["--gpu", "4090"], "did you mean rtx-4090"),
        (["--gpu", "4GiB"], "add --memory 4GiB"),
        (["--gpu", "missing.json"], "missing.json cannot be read"),
        (["--hostfile", "missing"], "the hostfile missing does not exist"),
    ],
)
def test_mistakes(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [] if "--hostfile" in more else ["--num-gpus", "2"]
    assert main([*PLAN, *ranks, *more]) == 2
    assert words in capsys.readouterr().err


def test_hosts_must_be_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=4\n")
    assert main([*PLAN, "--hostfile", str(hosts)]) == 2
    assert "between 2 and 4 slots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "sequence", "wanted"), [(1, 2048, 256), (48, 4096, 192), (16384, 8192, 2048)]
)
def test_a_batch_for_who_names_none(world: int, sequence: int, wanted: int) -> None:
    assert default_batch(world, sequence) == wanted


def test_this_machine_is_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "device.json"
    assert main(["bench", "device", "--num-gpus", "2", "--out", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out]
    found = device(str(out))
    assert found.per_node == 2 and found.calibrated_on.startswith("measured")
    assert min(found.flops, found.traffic, found.inside, found.host, found.memory) > 1e6
    broken = tmp_path / "broken.json"
    broken.write_text('{"names": []}')
    assert main([*PLAN, "--num-gpus", "2", "--gpu", str(broken)]) == 2
    assert "lacks across_gb_s" in capfd.readouterr().err
