"""`launch manifest`: the Kubernetes manifest, and the behaviour of its pods."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.manifest import print_manifest
from launcher.cluster.kubernetes import CONFIG_DIRECTORY, INDEX
from launcher.errors import ConfigError
from tests.cluster.launching import environment
from tests.cluster.test_elastic import free_port

AWKWARD = "a $(RANK) $$ 'b' \"c\""
SCRIPT = """
import json, os, pathlib, sys
told = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["WORD"], sys.argv[1:]]
pathlib.Path("told" + os.environ["RANK"]).write_text(json.dumps(told))
"""
PLAIN = ("--image", "me/train:1", "--num_nodes", "2", "--num_gpus", "2", "--token_secret", "word")


def items(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert print_manifest(argv) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["apiVersion"], tree["kind"]) == ("v1", "List")
    return list(tree["items"])


def pods_of(job: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return (specification, variables that the controller adds) of each pod, as the controllers create them."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        replicas = [
            spec["pytorchReplicaSpecs"][kind]["template"]["spec"]
            for kind in ("Master", "Worker")
            for _ in range(spec["pytorchReplicaSpecs"].get(kind, {"replicas": 0})["replicas"])
        ]
        shared = {"WORLD_SIZE": str(len(replicas)), "MASTER_ADDR": f"{job['metadata']['name']}-master-0"}
        return [(pod, {**shared, "RANK": str(rank)}) for rank, pod in enumerate(replicas)]
    (replicated,) = spec["replicatedJobs"]
    template = replicated["template"]["spec"]
    assert template["completionMode"] == "Indexed" and template["parallelism"] == template["completions"]
    pod = template["template"]["spec"]
    return [(pod, {"JOB_COMPLETION_INDEX": str(i)}) for i in range(template["completions"])]


def started(
    pod: dict[str, Any], added: dict[str, str], cwd: Path, replaced: dict[str, str]
) -> subprocess.Popen[str]:
    """Start the command of a pod as a process on this machine."""
    (container,) = pod["containers"]
    variables = dict(added)
    for entry in container["env"]:
        if "secretKeyRef" in entry.get("valueFrom", {}):
            variables[entry["name"]] = "a token of the run's own"
        elif "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            variables[entry["name"]] = added["JOB_COMPLETION_INDEX"]
        else:
            variables[entry["name"]] = expanded(entry["value"], variables)
    arguments = [expanded(text, variables) for text in container["args"]]
    arguments = [replaced.get(text, text.replace(CONFIG_DIRECTORY, str(cwd))) for text in arguments]
    assert container["command"] == ["launch"]
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", *arguments],
        cwd=cwd,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand variables as Kubernetes does: $(NAME) for a known variable, $$ for $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


@pytest.mark.parametrize(
    ("kind", "first"), [("pytorchjob", "launch-master-0"), ("jobset", "launch-node-0-0.launch")]
)
def test_pods_make_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, first: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    Path("ds.json").write_text('{"train_batch_size": 4} // as it is')
    flags = ("--kind", kind, *PLAIN, "--device=cpu", "--config", "ds.json", "--export", f"WORD={AWKWARD}")
    config, job = items(capsys, *flags, "--no_local_rank", "script.py", AWKWARD)
    assert config["data"] == {"ds_config.json": Path("ds.json").read_text()}
    Path("ds_config.json").write_text(config["data"]["ds_config.json"])
    # The cluster's names and the well-known port are not of this machine.
    replaced = {first: "127.0.0.1", "29500": str(free_port())}
    processes = [started(pod, added, tmp_path, replaced) for pod, added in pods_of(job)]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
    told = [json.loads(Path(f"told{rank}").read_text()) for rank in range(4)]
    assert told == [[str(rank), "4", AWKWARD, [AWKWARD]] for rank in range(4)]


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_what_a_pod_has(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    more = ("--shm", "16Gi", "--volume", "data:/data", "--term_grace", "60")
    flags = ("--kind", kind, *PLAIN, *more, "--name", "mine", "--namespace", "team", "--max_restarts", "3")
    (job,) = items(capsys, *flags, "--min_nodes", "1", "--module", "my.train")
    assert job["metadata"] == {"name": "mine", "namespace": "team"}
    pods = pods_of(job)
    assert len(pods) == 2
    for pod, _ in pods:
        (container,) = pod["containers"]
        assert container["image"] == "me/train:1" and container["resources"] == {
            "limits": {"nvidia.com/gpu": "2"}
        }
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts == {"shm": "/dev/shm", "claim-data": "/data"} and volumes.keys() == mounts.keys()
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert volumes["claim-data"]["persistentVolumeClaim"] == {"claimName": "data"}
        assert pod["terminationGracePeriodSeconds"] == 90
        secret = {"secretKeyRef": {"name": "word", "key": "token"}}
        assert {"name": "LAUNCHER_TOKEN", "valueFrom": secret} in container["env"]
        tail = container["args"][container["args"].index("--num_gpus") :]
        assert tail == ["--num_gpus", "2", "--term_grace", "60", "--max_restarts", "3", "--min_nodes", "1",
                        "--module", "my.train"]  # fmt: skip
    spec = job["spec"]
    if kind == "pytorchjob":
        assert job["apiVersion"] == "kubeflow.org/v1" and pods[0][0]["containers"][0]["name"] == "pytorch"
        assert spec["runPolicy"]["backoffLimit"] == 3
        assert {replica["restartPolicy"] for replica in spec["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    else:
        assert job["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and spec["network"]["subdomain"] == "mine"
        template = spec["replicatedJobs"][0]["template"]["spec"]
        assert template["backoffLimit"] == 3 and pods[0][0]["restartPolicy"] == "OnFailure"
        assert template["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_one_pod_and_no_second_try(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--image", "i", "--num_nodes", "1", "--num_gpus", "1", "--module", "m")
    (job,) = items(capsys, "--kind", "pytorchjob", *flags)
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert job["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"
    (job,) = items(capsys, "--kind", "jobset", *flags)
    assert pods_of(job)[0][0]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--image", "i", "--num_nodes", "2", "m"], "--num_gpus is missing"),
        ([*PLAIN, "--hostfile", "h", "m"], "--hostfile is not supported in a manifest"),
        ([*PLAIN, "--name", "My_Run", "m"], "lowercase letters, digits and dashes, starting with a letter"),
        ([*PLAIN, "--volume", "data", "m"], "needs CLAIM:/PATH"),
        ([*PLAIN, "--shm", "16 Gi", "m"], "needs a size such as 16Gi"),
        ([*PLAIN, "--min_nodes", "3", "--module", "m"], "--min_nodes 3: the number of hosts is 2"),
        ([*PLAIN, "pretrain", "--max-steps", "3"], "--config is missing"),
        ([*PLAIN, "--config", "{}", "pretrain"], "--output-dir is missing"),
        ([*PLAIN, "--config", "{}", "pretrain", "--max-stepz", "3"], "--max-steps"),
        ([*PLAIN, "--config", '{"train_batch_sze": 3}', "--module", "m"], "train_batch_size"),
    ],
)
def test_mistakes_are_seen_before_kubernetes_sees_them(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        print_manifest(["--kind", "jobset", *argv])


def test_a_variable_may_have_its_value_from_here(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = items(capsys, "--kind", "pytorchjob", *PLAIN, "--export", "HOME", "--module", "m")
    (container,) = pods_of(job)[0][0]["containers"]
    assert {"name": "HOME", "value": os.environ["HOME"]} in container["env"]
