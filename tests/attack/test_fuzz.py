"""Randomly mutated JSONs and command lines always get an answer: no traceback, and no run of more than 5 s."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from launcher.cli.launch_flags import launch_parser
from launcher.cli.main import SUBCOMMANDS, main
from launcher.cli.recipe_flags import training_parser
from launcher.cluster import join
from launcher.config import Config, load
from launcher.config.resolve import complete, micro_batch_of
from launcher.config.schema import implemented_paths, known_paths
from launcher.errors import LauncherError
from tests.cluster.launching import ROOT

HANG_S = 5
SEEDS = [
    *sorted((ROOT / "ds_configs").glob("*.json")),
    *sorted((ROOT / "tests" / "config" / "configs").glob("*.json")),
]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1e308, -0.0, 0.5, 2**31, 2**63, 10**25, float("inf"), float("nan"), "auto", "",
    "cpu", "nvme", "none", "x" * 500, "\x1b[2J", "\u00e9\u202e", "3", "True", "AdamW", "Muon", "WarmupLR", "OneCycle",
    "profile", [], [1], [0.9, 0.95], ["auto"], [None], [[1, 2]], [{}], {}, {"enabled": True}, {"enabled": "auto"},
    {"device": "cpu"}, {"type": "AdamW"}, {"type": "auto"}, {"stage": 3}, {"a": {"b": {"c": 1}}}, "/nowhere", "fp16",
    "bf16", "linear", "1f1b", "best",
]  # fmt: skip
TEXTS = ["{", "}", "[", "]", ",", ":", '"', "\\", "\\u12", "\\ud834", "//", "/*", "*/", "#", "NaN", "None", "{{X}}",
         "1e", "-", "\x00", "\x1b", "\ufeff", "\u2028", "9" * 400, "'", "\n"]  # fmt: skip
WORDS = [
    "", "0", "1", "2", "3", "8", "-1", "1.5", "nan", "1e400", "\u00b2", "9" * 30, "x", "-", "--", "---", "=", "auto",
    "cpu", "cuda", "absent", "absent.json", "{good}", "{wrong}", "{hosts}", "{script}", "{directory}", "/dev/null",
    "a=b", "A", "A=b", "node1", "node1:0", "node1@node2:0,1", "node9", "1,2", "0-3", "0-9999999", "all", "slurm", "ssh",
    "pdsh", "info", "pretrain", "finetune", "pretrian", "hf_trainer", "\x1b[1m", "\udcff", "1f1b", "zb", "80GiB",
    "9" * 400 + "G", "h100", "jobset", "{}", '{"a": 1}', "e30=", "--help", "-h", "-q", "'", '"', "$(x)", "latest",
    "3-4", "4-3", "a,b", "127.0.0.1", "::1", "\n", "1000", "100000", "1000000000", "1" * 18, "1e9", "-p 'x", "a b",
]  # fmt: skip


class Hang(BaseException):
    """The run took more than HANG_S seconds."""


def answered(call: Callable[[], Any]) -> str | None:
    """Run it with captured output; return what is wrong with how it ended."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(out):
            call()
            out.flush()
    except LauncherError:
        return None
    except (Exception, Hang):
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


# ---- JSONs --------------------------------------------------------------------------------------


LIKELY = {
    bool: [True, False, "auto"],
    int: [0, 1, 2, 3, 4, 8, 16, 1000],
    float: [0.0, 1e-4, 0.5, 1.0, 2.0, 1e9],
}
"""What stands in the place of a value of the same type: many of these are taken, and go far."""


def another(rng: random.Random, value: Any) -> Any:
    """Return a copy, since a later mutation may write into a value of an earlier one."""
    return copy.deepcopy(rng.choice(LIKELY.get(type(value), ODD) if rng.random() < 0.7 else ODD))


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value of a tree."""
    found: list[tuple[Any, Any]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += [(tree, key), *places_in(value)]
    return found


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *around, last = path.replace("[]", "").split(".")
    for key in around:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[last] = copy.deepcopy(value)


def changed_tree(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 5])):
        places = places_in(tree)
        holder, key = rng.choice(places) if places else (tree, "train_batch_size")
        way = rng.choice([0, 1, 2, 2, 3, 4, 5, 5, 5, 5])
        if way == 0:
            put(tree, rng.choice(implemented_paths(Config)), rng.choice(ODD))
        elif way == 1:
            put(tree, rng.choice(known_paths()), rng.choice(ODD))
        elif way == 2 and isinstance(holder, dict):
            holder.pop(key, None)
        elif way == 3 and isinstance(holder, dict):
            letters = list(str(key))
            letters[rng.randrange(max(1, len(letters))) : 1] = rng.choice(["", "x", "_", "A", "\u00e9"])
            holder["".join(letters)] = holder.pop(key, None)
        elif way == 4 and places:
            other, its = rng.choice(places)
            holder[key] = copy.deepcopy(other[its])
        else:
            holder[key] = another(rng, holder.get(key) if isinstance(holder, dict) else holder[key])
    return tree


def changed_text(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(text) + 1)
        length = rng.choice([0, 1, 1, 3, 20])
        text = text[:at] + rng.choice([*TEXTS, "", text[at : at + 30]]) + text[at + length :]
    return text


def mutation(rng: random.Random) -> str:
    seed = rng.choice(SEEDS)
    if rng.random() < 0.3:
        return changed_text(rng, seed.read_text())
    return json.dumps(changed_tree(rng, load_tree(seed)), indent=1).replace("NaN", "nan")


def load_tree(path: Path) -> dict[str, Any]:
    from launcher.config.source import read

    return read(path).tree


def used(path: str, ranks: int) -> None:
    """Read the JSON as a rank does before it builds a model."""
    config = complete(load(path), {"--learning-rate": 1e-3})
    dp = config.dp_degree(ranks)
    steps = dict.fromkeys(("total_num_steps", "total_steps", "T_max", "warmup_num_steps"), 10)
    auto: dict[str, int | None] = {f"scheduler.params.{key}": value for key, value in steps.items()}
    config.resolve(
        dp_degree=dp, auto={**auto, "train_micro_batch_size_per_gpu": micro_batch_of(config, dp, 4)}
    ).to_dict()


def calls_of(path: Path, ranks: int) -> list[Callable[[], Any]]:
    """Return the calls made for a JSON."""
    new = path.with_name("new.json")
    new.unlink(missing_ok=True)
    return [
        lambda: main(["check", str(path), "--num-gpus", str(ranks), "--explain"]),
        lambda: main(["check", str(path), "--migrate", str(new)]),
        lambda: main(["--config", str(path), "--dry_run", "pretrain", "--learning-rate", "1e-3"]),
        lambda: used(str(path), ranks),
    ]


def fuzz_jsons(directory: Path, number: int, seed: int) -> None:
    rng, path = random.Random(seed), directory / "ds.json"
    failures = []
    for case in range(number):
        text, ranks = mutation(rng), rng.choice([1, 2, 3, 8, 64])
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        wrong = next(filter(None, map(answered, calls_of(path, ranks))), None)
        if wrong is not None:
            failures.append(f"case {case} of seed {seed}, {ranks} ranks:\n{text}\n{wrong}")
    assert not failures, f"{len(failures)} of {number}:\n" + "\n".join(failures[:3])


def test_some_changed_jsons(tmp_path: Path) -> None:
    fuzz_jsons(tmp_path, 100, 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_changed_jsons(tmp_path: Path, seed: int) -> None:
    fuzz_jsons(tmp_path, 500, 100 + seed)


# ---- command lines ------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Create files to be named, and disable starting, executing and waiting."""
    monkeypatch.chdir(tmp_path)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError(2, "nothing is started in this test")

    def left(*args: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr(os, "execv", left)
    monkeypatch.setattr(join, "connect", left)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (tmp_path / "script.py").write_text("")
    (tmp_path / "wrong.json").write_text('{"train_batch_size": "x"}')
    yield {
        "good": str(ROOT / "ds_configs" / "hf_zero3.json"),
        "wrong": str(tmp_path / "wrong.json"),
        "hosts": str(tmp_path / "hosts"),
        "script": str(tmp_path / "script.py"),
        "directory": str(tmp_path),
    }


LAUNCH = [*launch_parser().known_flags()]
RECIPE = [*training_parser("pretrain", "").known_flags()]
GOOD = {
    "--num_gpus": "2", "--num-gpus": "4", "--device": "cpu", "--hostfile": "{hosts}", "-H": "{hosts}",
    "--num_nodes": "2", "--include": "node1@node2:0", "--exclude": "node1:1", "--launcher": "pdsh",
    "--launcher_args": "-v", "--ssh_port": "22", "--master_addr": "127.0.0.1", "--master_port": "29511",
    "--export": "A=b", "--node_rank": "1", "--min_nodes": "1", "--max_nodes": "2", "--term_grace": "20",
    "--checkpoint_exit_code": "75",
    "--hang_timeout": "0", "--max_restarts": "2", "--bind_core_list": "0", "--tee": "all", "--log_level": "info",
    "--submit": "-p x", "--sync": "{directory}", "--node_timeout": "5", "--max-steps": "3", "--epochs": "1.5",
    "--learning-rate": "1e-3", "--batch-size": "8", "--output-dir": "{directory}", "--seq-length": "64",
    "--profile-steps": "3-4", "--resume": "latest", "--stages": "4", "--microbatches": "8", "--chunks": "2",
    "--costs": "1,1,1", "--kind": "jobset", "--image": "me/train:1", "--model": "absent", "--gpu": "h100",
    "--global-batch": "8", "--size": "1M", "--enable_each_rank_log": "{directory}", "--venv_script": "{script}",
}  # fmt: skip
"""A value that is fine for a flag, so that what comes behind it is reached."""
OF_SUBCOMMANDS = ["--num-gpus", "--explain", "--migrate", "--stages", "--microbatches", "--chunks", "--costs", "--kind",
                  "--image", "--num_nodes", "--model", "--gpu", "--seq-length", "--hostfile", "--json", "--write",
                  "--global-batch", "--out", "--size"]  # fmt: skip
QUIET = [name for name in SUBCOMMANDS if name not in ("bench", "report", "ssh")]
"""Subcommands that start nothing; the others are asked for help, or wrongly."""


def word(rng: random.Random, place: dict[str, str]) -> str:
    text = rng.choice(WORDS)
    for name, path in place.items():
        text = text.replace("{" + name + "}", path)
    return text


def some(rng: random.Random, flags: list[str], place: dict[str, str]) -> list[str]:
    """Return flags with and without values, misspelt, joined by `=`; and words in wrong places."""
    found: list[str] = []
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        flag = rng.choice(flags)
        if rng.random() < 0.1:
            at = rng.randrange(len(flag))
            flag = flag[:at] + rng.choice(["", "x", "-", "_"]) + flag[at + 1 :]
        way = rng.random()
        if flag in GOOD and rng.random() < 0.7:
            found += [flag, GOOD[flag].format(**place)]
        elif way < 0.6:
            found += [flag, word(rng, place)]
        elif way < 0.8:
            found.append(f"{flag}={word(rng, place)}")
        else:
            found.append(flag if way < 0.95 else word(rng, place))
    return found


def command_line(rng: random.Random, place: dict[str, str]) -> list[str]:
    if rng.random() < 0.3:
        name = rng.choice(QUIET)
        first = [word(rng, place)] if rng.random() < 0.4 else []
        if name in ("check", "schedule") and rng.random() < 0.7:
            first = [{"check": place["good"], "schedule": rng.choice(["1f1b", "gpipe", "interleaved"])}[name]]
        return [name, *first, *some(rng, OF_SUBCOMMANDS, place)]
    if rng.random() < 0.1:
        return [rng.choice(["bench", "report", "ssh"]), "--help"]
    config = (
        ["--config", place["good"] if rng.random() < 0.8 else word(rng, place)] if rng.random() < 0.9 else []
    )
    recipe = (
        [rng.choice(["pretrain", "finetune", place["script"], word(rng, place)])]
        if rng.random() < 0.8
        else []
    )
    # `--dry_run` stands first, so that no value before it takes it.
    own = ["--dry_run", *config, *some(rng, LAUNCH, place)]
    return [*own, *recipe, *(some(rng, RECIPE, place) if recipe else [])]


def fuzz_commands(place: dict[str, str], number: int, seed: int) -> None:
    rng, failures = random.Random(seed), []
    for case in range(number):
        argv = command_line(rng, place)

        def call(argv: list[str] = argv) -> None:
            assert main(argv) in (0, 1, 2, 130)

        wrong = answered(call)
        if wrong is not None:
            failures.append(f"case {case} of seed {seed}: {argv!r}\n{wrong}")
    assert not failures, f"{len(failures)} of {number}:\n" + "\n".join(failures[:3])


def test_some_command_lines(place: dict[str, str]) -> None:
    fuzz_commands(place, 50, 2)


@pytest.mark.full
def test_five_hundred_command_lines(place: dict[str, str]) -> None:
    fuzz_commands(place, 500, 3)
