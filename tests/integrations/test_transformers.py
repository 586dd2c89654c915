"""Hugging Face's Trainer and accelerate, PEFT's LoRA and TRL's trainers, unmodified, on our engine.

Two ranks are compared with one plain process. Two launches take nearly all of the time, mostly for imports; all tests
check their results.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launching import environment
from tests.integrations import TIED

SCRIPT = str(Path(__file__).with_name("hf_scenarios.py"))
TRL_SCRIPT = str(Path(__file__).with_name("trl_scenarios.py"))  # has all of the other's, too
LIMIT_S = 280
ALIKE = ["stage1", "stage3", "json_hf", "bf16", "recomputed", "cpu3", "tp"]
ALIKE_REST = ["stage0", "stage2", "json_json", "hf_json", "no_warm_up", "fp16", "cpu2", "nvme3", "tp3"]
RESUMED, RESUMED_REST = ["resumed"], ["resumed_with_json_optimizer"]
PLAIN = ["plain", "plain_bf16", "plain_sp"]
RESUMED_ELSEWHERE = ["resumed_elsewhere", "resumed_elsewhere" + TIED]
STAGES = [2, 3]
AFTER_THE_STEP = ["json_hf", "cpu3"]  # the engine steps the schedule before the rate is logged


def kinds(names: list[str], rest: Sequence[str] = ()) -> list[Any]:
    """Return every scenario with an untied and with a tied model.

    `make test` alternates between them, with exceptions.
    """
    both = [(name, name + TIED) if at % 2 else (name + TIED, name) for at, name in enumerate(names)]
    others = [other for _, other in both] + [name + tied for name in rest for tied in ("", TIED)]
    return [*(one for one, _ in both), *(pytest.param(other, marks=pytest.mark.full) for other in others)]


def run(directory: Path, ranks: int, names: list[str], script: str = SCRIPT) -> dict[str, Any]:
    """Return the results of a script's scenarios on this number of ranks."""
    command = [sys.executable, "-m", "launcher.cli.main", "--num_gpus", str(ranks), "--device", "cpu", script]
    done = subprocess.run(
        [*command, str(directory), *names],
        cwd=directory, env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the requested scenarios: ours on two ranks; plain ones and a resumed one on one."""
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    libraries = {name for name in asked if name.split()[0] in TRAINERS}
    script = TRL_SCRIPT if libraries else SCRIPT
    directory = tmp_path_factory.mktemp("hf")
    ours = run(directory, 2, sorted(asked | {"resumed", "resumed" + TIED}), script)
    plain = [*PLAIN, *(name + TIED for name in PLAIN), *sorted({plainly(name) for name in libraries})]
    # A process that has had a JSON once has one for good: what is plain comes first.
    return ours | run(directory, 1, plain + RESUMED_ELSEWHERE, script)


def found(results: dict[str, Any], name: str) -> Any:
    value = results[name]
    assert not (isinstance(value, dict) and "error" in value), value["error"]
    return value


# How far losses may be from those of one plain process. DeepSpeed's schedule is compared by the peer-parity suite;
# 16 bits are kept in other places than autocast keeps them.
DEEPSPEEDS_SCHEDULE = dict.fromkeys(("json_json", "hf_json", "no_warm_up"), 1e-2)
LIMITS = {**DEEPSPEEDS_SCHEDULE, "bf16": 1e-3, "fp16": 3e-4, "json_hf": 1e-6, "cpu3": 1e-6}


@pytest.mark.parametrize("name", kinds(ALIKE, ALIKE_REST))
def test_training_is_that_of_one_process(results: dict[str, Any], name: str) -> None:
    """Losses, gradient norms and learning rates of five steps, the last of them with fewer microbatches."""
    scenario, tied = name.removesuffix(TIED), TIED if name.endswith(TIED) else ""
    ours, plain = (
        found(results, name),
        found(results, ("plain_bf16" if scenario == "bf16" else "plain") + tied),
    )
    limit = LIMITS.get(scenario, 1e-6)
    assert ours["engine"] == "launcher.engine.engine" and len(ours["losses"]) == 5
    assert ours["losses"] == pytest.approx(plain["losses"], rel=limit)
    if limit <= 1e-6:
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        shift = 1 if scenario in AFTER_THE_STEP else 0
        assert ours["rates"][: 5 - shift] == pytest.approx(plain["rates"][shift:])


@pytest.mark.parametrize("name", kinds(["sp"]))
def test_a_parallelism_config_shares_sequences(results: dict[str, Any], name: str) -> None:
    """`TrainingArguments(parallelism_config=ParallelismConfig(sp_size=2))`, which otherwise selects DeepSpeed's
    Ulysses.
    """
    ours, plain = found(results, name), found(results, f"plain_{name}")
    assert ours["engine"] == "launcher.engine.engine" and len(ours["losses"]) == len(plain["losses"]) == 9
    for key in ("losses", "norms", "evaluated"):
        assert ours[key] == pytest.approx(plain[key], rel=1e-6), key


@pytest.mark.parametrize("name", kinds(RESUMED, RESUMED_REST))
def test_a_resumed_run_is_the_one_that_was_not_interrupted(results: dict[str, Any], name: str) -> None:
    run = found(results, name)
    assert run["resumed"]["losses"] == run["whole"]["losses"]
    assert run["resumed"]["rates"] == run["whole"]["rates"]


@pytest.mark.parametrize("name", kinds(["resumed"]))
def test_a_run_goes_on_with_another_number_of_ranks(results: dict[str, Any], name: str) -> None:
    whole = found(results, name)["whole"]["losses"]
    assert found(results, name.replace("resumed", "resumed_elsewhere"))["losses"] == pytest.approx(
        whole, rel=1e-6
    )


@pytest.mark.parametrize("name", kinds(["best"]))
def test_the_best_model_is_loaded_at_the_end_of_a_run_that_stops_early(
    results: dict[str, Any], name: str
) -> None:
    run = found(results, name)
    assert run["steps"] < 10
    *while_training, last = run["evaluated"]
    assert run["best"] == min(while_training) == last != while_training[-1]
    assert run["after"] == pytest.approx(run["best"])


@pytest.mark.parametrize("name", kinds(["saved"]))
def test_weights_are_saved_whole_or_in_shards(results: dict[str, Any], name: str) -> None:
    """Both can be loaded: with from_pretrained directly, or with the script next to the checkpoint."""
    run = found(results, name)
    assert "model.safetensors" in run["files True"]
    assert {"global_step2", "latest", "zero_to_fp32.py"} <= set(run["files False"])
    for kind in ("True", "False"):
        assert run[f"read {kind}"] == pytest.approx(run[f"trained {kind}"], rel=1e-6)


@pytest.mark.parametrize("name", kinds(["evaluated"]))
def test_a_pretrained_model_is_read_into_shards(results: dict[str, Any], name: str) -> None:
    """It evaluates like a plain one; training with an evaluation engine is an error."""
    run = found(results, name)
    assert run["kinds"] == ["ShardedParameter"] and run["tied"] == name.endswith(TIED)
    assert run["before"] == pytest.approx(run["plain"], rel=1e-6)
    assert len(run["losses"]) == 5 and run["after"] != run["before"]
    assert "train with another Trainer" in run["again"]


@pytest.mark.parametrize("name", kinds([], ["resized"]))
def test_embeddings_are_resized_under_zero3(results: dict[str, Any], name: str) -> None:
    run = found(results, name)
    assert run["shape"] == [136, 32]
    assert run["before"] == pytest.approx(run["plain"], rel=1e-5)
    assert run["losses"] == pytest.approx([run["before"]] * 5, rel=0.03)


@pytest.mark.parametrize("name", kinds([], ["from_config"]))
def test_a_model_from_a_config_is_made_in_shards(results: dict[str, Any], name: str) -> None:
    run = found(results, name)
    assert run["kinds"] == ["ShardedParameter"] and len(run["losses"]) == 5
    assert run["losses"] == pytest.approx([math.log(128)] * 5, rel=0.02)  # nothing is known yet


@pytest.mark.parametrize("name", kinds(["generated"]))
def test_ranks_generate_as_many_tokens_as_each_wants(results: dict[str, Any], name: str) -> None:
    for rank, (ours, plain) in enumerate(found(results, name)):
        assert ours == plain and len(ours[0]) == 6 + 5 * rank


@pytest.mark.parametrize("name", kinds(["accelerated"]))
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_loop_with_accelerate(results: dict[str, Any], name: str, stage: str) -> None:
    """Covers accumulation, clipping, save_state and load_state, full weights; both stages give equal results."""
    run = found(results, name)
    assert run[stage]["again"] == run[stage]["losses"][4:]
    assert run[stage]["losses"] == pytest.approx(run["2"]["losses"], rel=1e-6)
    assert run[stage]["norms"] == pytest.approx(run["2"]["norms"], rel=1e-5)
    assert run[stage]["unwrapped"] == "LlamaForCausalLM" and run[stage]["names"] == 21


@pytest.mark.parametrize("name", ["staged"])
def test_pipeline_stages_are_refused_with_a_way_out(results: dict[str, Any], name: str) -> None:
    assert "pipeline.stages is 2" in results[name] and "launch --config DS.json pretrain" in results[name]


# ---- PEFT and TRL -------------------------------------------------------------------------------------

TRAINERS = ("lora", "sft", "dpo")


def plainly(name: str) -> str:
    """Return the scenario of one plain process for "KIND STAGE" or "KIND STAGE tied"."""
    kind, _, *tied = name.split()
    return " ".join([kind, "plain", *tied])


def stages_of(kind: str, library: str) -> list[Any]:
    """Return tied and untied models at every stage; `make test` uses stage 3 tied, and stage 2 untied for SFT."""
    there = importlib.util.find_spec(library) is not None
    marks = [pytest.mark.skipif(not there, reason=f"pip install {library}")]
    return [
        pytest.param(
            name, marks=marks if name in (f"{kind} 3{TIED}", "sft 2") else [*marks, pytest.mark.full]
        )
        for name in (f"{kind} {stage}{tied}" for stage in STAGES for tied in ("", TIED))
    ]


def check_alike(ours: dict[str, Any], plain: dict[str, Any], steps: int) -> None:
    assert ours["engine"] == "launcher.engine.engine" != plain["engine"]
    assert len(ours["losses"]) == steps and len(set(ours["losses"])) > 1
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)


@pytest.mark.parametrize("name", stages_of("lora", "peft"))
def test_a_lora_is_trained_and_saved(results: dict[str, Any], name: str) -> None:
    ours, plain = found(results, name), found(results, plainly(name))
    check_alike(ours, plain, 5)
    assert len(ours["adapter"]) == 8 and all(norm > 0 for norm in ours["adapter"].values())
    assert ours["adapter"] == pytest.approx(plain["adapter"], rel=1e-4)


@pytest.mark.parametrize("name", stages_of("sft", "trl"))
def test_sft_trainer(results: dict[str, Any], name: str) -> None:
    check_alike(found(results, name), found(results, plainly(name)), 4)


@pytest.mark.parametrize("name", stages_of("dpo", "trl"))
def test_dpo_trainer(results: dict[str, Any], name: str) -> None:
    """The reference model is frozen; the margins match those of one process."""
    ours, plain = found(results, name), found(results, plainly(name))
    check_alike(ours, plain, 3)
    assert ours["margins"][-1] != 0
    assert ours["margins"] == pytest.approx(plain["margins"], rel=1e-3, abs=1e-6)
