"""Absurd numbers, damaged files and odd names give a one-line error, or a correct run, without delay."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.cli import hosts
from launcher.cli.main import _MaskingStream, main
from launcher.cli.request import RunRequest
from launcher.cli.submit import batch_script, submit
from launcher.cluster.environment import asked_for
from launcher.cluster.hostfile import Host, read_hostfile
from launcher.cluster.node import Node
from launcher.data.sft import load_sft
from launcher.data.text import load_text
from launcher.data.tokenizer import load_tokenizer
from launcher.errors import ConfigError
from tests.cluster.launching import environment, launch

LIMIT_S, LIMIT_MIB = 2.0, 200
FILES: dict[str, tuple[str, str]] = {
    "deep": ("{\"a\":" * 900 + "1" + "}" * 900, "nested more than"),
    "lists": ("{\"a\":" + "[" * 5000 + "]" * 5000 + "}", "nested more than"),
    "digits": ("{\"train_batch_size\": " + "9" * 5000 + "}", "a number has 5,000 digits"),
    "fraction": ("{\"train_batch_size\": 0." + "9" * 5000 + "}", "a number has 5,002 digits"),
    "keys": (json.dumps({f"key_number_{i}": i for i in range(200_000)}), "more than 2,000 keys"),
    "items": (json.dumps({"a": [0] * 200_000}), "more than 2,000 keys"),
    "strangers": (json.dumps({f"train_batch_sizx{i}": i for i in range(1999)}), "unknown key"),
    "longest": ("{\"fp16\": {\"" + "k" * 1_000_000 + "\": 1}}", "unknown key"),
    "surrogate": ("{\"train_batch_size\\ud800\": 1}", "half of a surrogate pair"),
    "escape": ("{\"a\x1b[2Jb\\u0007\": 1, \"optimizer\": {\"type\": \"\\u001b[1m\"}}", "a\\x1b[2Jb\\x07"),
    "newline": ("{\"fp16\": {\"a\\nb\": 1}}", "a\\nb: unknown key"),
    "huge": ("{\"train_batch_size\": 1e300}", "must be at most"),
    "largest": ("{\"train_batch_size\": 9223372036854775807, \"gradient_accumulation_steps\": 7}", "must equal"),
    "word": ("{\"train_batch_size\": \x1bred}", "`\\x1bred` is not a value"),
}  # fmt: skip
JOINING = ("--no_ssh", "--num_nodes", "2", "--master_addr", "127.0.0.1")
FLAGS = [
    (["--num_gpus", "100000", "--device", "cpu"], "100,000 ranks"),
    (["--num_gpus", "9" * 18, "--device", "cpu"], "ranks on this machine"),
    (["--num_gpus", "9" * 5000], "needs a whole number of at least 1"),
    (["--num_gpus", "100000", "--oversubscribe", "--device", "cpu"], "100,000 ranks"),
    (["--bind_core_list", "0-99999999", "--device", "cpu"], "'0-99999999'"),
    (["--bind_core_list", "4000", "--device", "cpu"], "core 4000"),
    (["--bind_core_list", "3-1", "--device", "cpu"], "'3-1'"),
    (["--tee", "9" * 5000], "--tee: needs a whole number"),
    (["--tee", "\u00b2"], "--tee: needs a whole number"),
    (["--master_port", "\u00b2"], "--master_port"),
    (["--num_nodes=--"], "argument --num_nodes: -- is not a value"),
    (["--hostfile", "many"], "no machine has more than 4,096"),
    (["--hostfile", "fifo"], "is a pipe or a device"),
    (["--config", "fifo"], "is a pipe or a device"),
    (["--config", '{"fp16": {"a\x1b[2J": 1}}'], "a\\x1b[2J"),
    (["--\x1b[2Jx"], "unknown flag --\\x1b[2Jx"),
    (["--no_ssh", "--num_nodes", "3000000", "--node_rank", "0", "--insecure"], "at most 16,384 hosts"),
    ([*JOINING, "--node_rank", "5"], "--node_rank 5: the number of hosts is 2"),
    ([*JOINING, "--node_rank", "5", "--dry_run"], "--node_rank 5: the number of hosts is 2"),
    (["--num_gpus", "100000000", "--dry_run"], "100,000,000 ranks on this machine"),
    (["--hostfile", "crowd", "--dry_run"], "a run has at most 262,144"),
    (["--hostfile", "escape"], "'a\\x1b[31m' is not a valid host name"),
    (["--hostfile", "bom", "--include", f"node1:{'9' * 5000}"], "nor a range of slots"),
    (["--hostfile", "bom", "--exclude", "x" * 5000], "not a host of this run"),
    ([*JOINING, "--node_rank", "0", "--token_file", "fifo"], "is a pipe or a device"),
    ([*JOINING, "--node_rank", "0", "--token_file", "/dev/zero"], "is a pipe or a device"),
    ([*JOINING, "--node_rank", "1", "--master_addr", "x" * 5000], "the name of a host"),
    (["--config", "alias.yaml"], "this is not valid YAML"),
    (["--config", "lists.yaml"], "num_machines must be a single value, not a list"),
    (["--config", "digits.yaml"], "a number with 4000 digits"),
    (["--module", ""], "'' is not a valid module name"),
    (["--no_python", ""], "'' is not a valid program name"),
    (["--no_python", "x" * 5000], "is not a valid program name"),
    (["x" * 5000 + ".py"], "file not found: x"),
    (["x" * 300 + ".py"], "file not found: x"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files of every kind."""
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FILES.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "many").write_text("node1 slots=99999999999\n")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfnode1 slots=2\nnode2 slots=2\n")
    (tmp_path / "crowd").write_text("".join(f"node{i} slots=4096\n" for i in range(20_000)))
    (tmp_path / "escape").write_text("a\x1b[31m slots=1\n")
    (tmp_path / "alias.yaml").write_text(f"num_processes: *{'x' * 4000}\n")
    laugh = "x"
    for name in "abcdefghi":
        laugh = f"[&{name} [{laugh}]{f', *{name}' * 9}]"
    (tmp_path / "lists.yaml").write_text(f"num_machines: {laugh}\n")
    (tmp_path / "digits.yaml").write_text(f"num_processes: {'9' * 4000}\n")
    (tmp_path / "script.py").write_text("print(1)\n")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def unprintable(text: str) -> list[str]:
    return [character for character in text if not character.isprintable() and character not in "\n\t"]


def test_a_json_of_any_kind_is_answered_at_once(
    place: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    main(["check", "deep.json"])  # imports
    for name, (_, says) in FILES.items():
        with subtests.test(name):
            capsys.readouterr()
            began = time.process_time()
            assert main(["check", f"{name}.json", "--num-gpus", "3"]) == 1
            assert time.process_time() - began < LIMIT_S
            said = "".join(capsys.readouterr())
            assert says in said and unprintable(said) == []
            assert main(["--config", f"{name}.json", "--dry_run", "pretrain"]) in (0, 2)
            assert unprintable("".join(capsys.readouterr())) == []


def test_flags_of_any_size_are_answered_at_once(
    place: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for flags, says in FLAGS:
        with subtests.test(says):
            capsys.readouterr()
            began = time.process_time()
            assert main([*flags, "script.py"]) == 2
            assert time.process_time() - began < LIMIT_S
            said = "".join(capsys.readouterr())
            assert says in said and unprintable(said) == [] and len(said) < 1000


@pytest.mark.full
def test_they_need_little_time_and_memory(place: Path, subtests: pytest.Subtests) -> None:
    """Measure whole processes in CPU seconds, minus only Python's start and the imports."""

    def run(arguments: list[str]) -> tuple[float, float]:
        # The peak that the parent of a process sees has that of its own memory in it.
        code = (
            "import sys; from launcher.cli.main import main\ntry: main(sys.argv[1:])\n"
            "finally: open('status', 'w').write(open('/proc/self/status').read())"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
        peak = next(line for line in (place / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return used.ru_utime + used.ru_stime, int(peak.split()[1]) / 1024

    start, _ = run(["check", "newline.json"])
    for arguments in [*(["check", f"{name}.json"] for name in FILES), *([*f, "script.py"] for f, _ in FLAGS)]:
        with subtests.test(str(arguments)[:60]):
            seconds, memory = run(arguments)
            assert seconds - start < LIMIT_S and memory < LIMIT_MIB


def test_ranks_that_the_cores_cannot_carry_are_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = len(os.sched_getaffinity(0))
    assert main(["--num_gpus", str(8 * cores + 1), "--device", "cpu", "script.py"]) == 2
    assert f"at most {8 * cores}, or --oversubscribe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--image", "i", "--num_nodes", "99999999"], "at most 16,384 hosts"),
        (["--image", "i", "--num_nodes", "1", "--num_gpus", "99999999"], "99,999,999 ranks"),
        (["--image", "a\nb"], "the name of an image, not 'a"),
        (["--image", "i", "--namespace", "a\nb"], "the name of an object"),
        (["--image", "i", "--token_secret", ""], "the name of an object"),
        (["--image", "i", "--volume", "a\nb:/data"], "needs CLAIM:/PATH"),
        (["--image", "i", "--module", ""], "'' is not a valid module name"),
        (["--image", "i", "x" * 5000 + ".py"], "is not a valid script name"),
    ],
)
def test_a_manifest_has_bounds_too(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["manifest", "--kind", "jobset", "--num_gpus", "1", "--num_nodes", "1"]
    assert (
        main([*common, *flags, *([] if flags[-2] == "--module" or flags[-1].endswith(".py") else ["m.py"])])
        == 2
    )
    said = capsys.readouterr().err
    assert says in said and len(said) < 500


def test_a_file_of_variables_is_read_as_carefully(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".deepspeed_env").write_bytes(b'A="x\0y"\n')
    with pytest.raises(ConfigError, match=r"A contains a NUL character(?s:.)*\.deepspeed_env:1"):
        asked_for([], {})
    for name in ("fifo", "/dev/zero"):
        with pytest.raises(ConfigError, match="is a pipe or a device"):
            asked_for([], {"DS_ENV_FILE": name})
    Path(".deepspeed_env").write_bytes(b"A = b c  # d\nB=x#y\nC='1 # 2' # 3\nD=\xff\n")
    assert asked_for([], {}) == {"A": "b c", "B": "x#y", "C": "1 # 2", "D": "\udcff"}
    assert asked_for([], {"DS_ENV_FILE": "x" * 5000}) == {}


@pytest.mark.parametrize(
    ("program", "fix"),
    [("./nope", "given by path"), ("./script.py", "chmod +x"), ("./plain", "#!/bin/sh")],
)
def test_a_program_that_cannot_be_run(place: Path, program: str, fix: str) -> None:
    Path("plain").touch(0o755)
    done = launch("--no_python", program, cwd=place)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"the program {program} cannot be run: " in done.stderr and fix in done.stderr


def test_names_of_hosts_do_not_act_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host names may also come from a scheduler, and facts from any machine."""
    host = Host("a\x1b[31m", (0,))
    node_group = SimpleNamespace(nodes=[Node(host, 0, [])], connect=lambda *_: (), close=lambda: None)
    job = SimpleNamespace(hosts=[host], front_end=lambda: SimpleNamespace(node_group=node_group), hello=None)
    job.shell_command, job.timeouts = (lambda *_: ["echo", "x"]), SimpleNamespace(fan_out=1)
    monkeypatch.setattr(hosts, "_job", lambda _: job)
    hosts.report([])
    hosts.ssh(["true"])
    said = capsys.readouterr().out + _MaskingStream().format(logging.makeLogRecord({"msg": "a\x1b[31m"}))
    assert unprintable(said) == [] and said.count("a\\x1b[31m") == 3


def test_a_hostfile_of_windows_is_read(place: Path) -> None:
    assert [(host.name, host.slots) for host in read_hostfile("bom")] == [
        ("node1", (0, 1)),
        ("node2", (0, 1)),
    ]


def flags_of(**changes: Any) -> Namespace:
    return Namespace(**{"num_nodes": 2, "term_grace": 0.0, "submit": "", **changes})


def test_paths_in_a_batch_script_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a b\nc"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "my $(touch x) script.py").write_text("")
    name = "my $(touch x) script.py"
    request = RunRequest(flags_of(module=False, no_python=False, config=None), [name, "--x", "y z"])
    text = batch_script(flags_of(), request, ["--num_nodes", "2", name, "--x", "y z"], tmp_path / "o u't")
    lines = text.splitlines()
    assert "#SBATCH --job-name=my___touch_x__script" in lines
    (output,) = (line for line in lines if "--output" in line)
    assert shlex.split(output.removeprefix("#SBATCH ")) == [f"--output={tmp_path}/o u't/slurm-%j.out"]
    body = text[text.index("cd ") :].replace(sys.executable, f"printf '%s\\n' \"$PWD\" {sys.executable}")
    done = subprocess.run(["sh", "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{here}\n") and done.stdout.endswith("my $(touch x) script.py\n--x\ny z\n")
    assert list(here.iterdir()) == [here / name]


def test_a_directory_that_sbatch_cannot_read_is_refused(tmp_path: Path) -> None:
    request = Namespace(
        arguments=["--output-dir", str(tmp_path / "a\n#SBATCH --x")], name="pretrain", is_ours=True
    )
    with pytest.raises(ConfigError, match="not allowed in #SBATCH lines"):
        submit(flags_of(), request, [])  # type: ignore[arg-type]


@pytest.fixture
def tokenizer() -> Iterator[Any]:
    yield load_tokenizer(None, None, 260)


def test_a_file_without_rows_says_so(tmp_path: Path, tokenizer: Any, subtests: pytest.Subtests) -> None:
    for text in ("", "\n\n"):
        with subtests.test(repr(text)):
            (tmp_path / "rows.jsonl").write_text(text)
            for load in (load_text, lambda path: load_sft(path, tokenizer, 32)):
                with pytest.raises(ConfigError, match="it has no rows"):
                    load(str(tmp_path / "rows.jsonl"))


def test_text_that_is_not_utf8_is_told_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prose.txt").write_bytes(b"good \xff line \xfe\n" * 3 + "\ufffd\n".encode() * 5)
    monkeypatch.setattr(logging.getLogger("launcher"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        load_text(str(tmp_path / "prose.txt"))
        load_text(str(tmp_path / "prose.txt"), split="eval")
    (told,) = [record.getMessage() for record in caplog.records if "UTF-8" in record.getMessage()]
    assert "prose.txt is not valid UTF-8 in 6 places" in told

    row = b'{"prompt": "a", "completion": "b"}\n'
    (tmp_path / "rows.jsonl").write_bytes(row * 20 + b'{"prompt": "\xff", "completion": "b"}\n' + row * 20)
    with pytest.raises(ConfigError, match=r"1 rows of .* not valid UTF-8 \(first: row 20\)"):
        load_sft(str(tmp_path / "rows.jsonl"), tokenizer, 32)
