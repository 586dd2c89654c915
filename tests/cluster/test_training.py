"""Training on two machines matches training in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launching import launch, launching, wait_for
from tests.cluster.test_elastic import free_port
from tests.cluster.testbed import Hosts, thorough
from tests.engine.test_recipes import BYTES, PROSE
from tests.pool.reference import tiny_llama

pytestmark = thorough
SECTIONS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "tp2pp2": {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2},
    },
}
PRETRAIN = (
    "pretrain",
    "--model",
    "model.json",
    "--dataset",
    "prose.txt",
    "--seq-length",
    "32",
    "--max-steps",
    "4",
)


def config(directory: Path, name: str, section: dict[str, Any]) -> str:
    content = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    (directory / f"{name}.json").write_text(json.dumps(content | section))
    return f"{name}.json"


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_two_machines_train_as_one_process(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(tiny_llama(vocab=BYTES, layers=2).config.to_dict()))
    (tmp_path / "prose.txt").write_text(PROSE)
    one = config(tmp_path, "one", {"zero_optimization": {"stage": 0}})
    done = launch("--config", one, "--device", "cpu", *PRETRAIN, "--output-dir", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hostfile = hosts.hostfile(tmp_path, slots=2)
    for name, section in SECTIONS.items():
        flags = ("--hostfile", hostfile, "--device", "cpu", "--config", config(tmp_path, name, section))
        end = hosts.launch(tmp_path, *flags, *PRETRAIN, "--output-dir", name)
        assert end.code == 0, end.errors + end.out
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        assert "4 ranks on cpu of 2 hosts (node1, node2)" in end.out


def test_a_run_that_loses_a_node_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(tiny_llama(vocab=BYTES, layers=2).config.to_dict()))
    (tmp_path / "prose.txt").write_text(PROSE)
    elastic = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1, 2]}
    section = {"elasticity": elastic, "zero_optimization": {"stage": 2}}
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **section}
    (tmp_path / "elastic.json").write_text(json.dumps(tree))
    long = (*("20" if word == "4" else word for word in PRETRAIN), "--save-every", "2")
    flags = ("--config", "elastic.json", "--device", "cpu", "--export", "OMP_NUM_THREADS=1")
    done = launch(*flags, *long, "--output-dir", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    flags += (
        "--no_ssh",
        "--insecure",
        "--num_nodes",
        "2",
        "--num_gpus",
        "1",
        "--min_nodes",
        "1",
        "--max_restarts",
        "1",
    )
    flags += ("--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--node_timeout", "3")
    nodes = [(*flags, "--node_rank", str(rank), *long, "--output-dir", "two") for rank in (0, 1)]
    with launching(*nodes[0], cwd=tmp_path) as first, launching(*nodes[1], cwd=tmp_path) as second:
        wait_for(tmp_path / "two" / "checkpoints" / "latest")
        second.kill()
        out, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    assert "continuing without node1" in out
    assert "batch   4 = 2 per microbatch x 1 accumulation step x 2 ranks" in out
    assert "batch   4 = 2 per microbatch x 2 accumulation steps x 1 rank" in out
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_sigterm_saves_a_checkpoint_where_it_has_time(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(tiny_llama(vocab=BYTES, layers=2).config.to_dict()))
    (tmp_path / "prose.txt").write_text(PROSE)
    config(tmp_path, "zero2", {"zero_optimization": {"stage": 2}})
    long = tuple("100000" if word == "4" else word for word in PRETRAIN)
    flags = ("--config", "zero2.json", "--device", "cpu", "--num_gpus", "2", "--term_grace", "60")
    flags += ("--checkpoint_exit_code", "75")
    with launching(*flags, *long, "--output-dir", "run", cwd=tmp_path) as process:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        process.terminate()
        out, errors = process.communicate(timeout=90)
    assert process.returncode == 75 and "stopped by SIGTERM; all ranks ended cleanly" in errors
    tag = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert f"SIGTERM: saved after step {tag.removeprefix('global_step')}" in out
