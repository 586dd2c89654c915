"""Secrets: files that only their owner may read stay so, and values are in no file or output that others see."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.cluster import environment, secret
from launcher.cluster.parcel import pack
from launcher.cluster.store import Store
from launcher.errors import ConfigError
from tests.cluster.launching import launch

VALUE = "not-for-others-4711"


@pytest.fixture(autouse=True)
def usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_copies_have_the_permissions_of_what_was_shipped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "keys").mkdir(parents=True)
    wanted = {"keys/id": 0o600, "run.sh": 0o755, "own.sh": 0o700, "read": 0o440, "text": 0o644}
    for name, permissions in wanted.items():
        (source / name).write_text(name)
        (source / name).chmod(permissions)
    parcel = pack([], str(source), str(source))

    def copied() -> Path:
        store = Store(parcel.manifest(), tmp_path / "there")
        here = os.getcwd()
        try:
            for piece in parcel.pieces(store.missing()):
                store.take(piece["digest"], piece["data"])
            return store.build()
        finally:
            os.chdir(here)

    copy = copied()
    assert {name: mode(copy / "tree" / name) for name in wanted} == wanted
    assert all(mode(file) & 0o077 == 0 for file in (tmp_path / "there" / "contents").iterdir())
    (copy / "tree/keys/id").chmod(0o644)
    assert mode(copied() / "tree/keys/id") == 0o600  # put right again
    (source / "text").chmod(0o600)
    parcel = pack([], str(source), str(source))
    assert mode(copied() / "tree/text") == 0o600  # the same content with other permissions


def test_a_batch_script_has_names_only_and_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f'#!/bin/sh\necho "$API_KEY $HF_TOKEN $PLAIN" > {tmp_path}/told\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/launch.sbatch").touch(0o644)
    exports = ("--export", f"API_KEY={VALUE}", f"--export=HF_TOKEN={VALUE}2", "--export", "PLAIN=word")
    flags = ("--submit=", "--num_nodes", "2", *exports)
    done = launch(*flags, "script.py", "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/launch.sbatch").read_text()
    assert VALUE not in text + done.stdout + done.stderr
    assert "--export API_KEY --export=HF_TOKEN --export PLAIN=word" in text
    assert mode(tmp_path / "out/launch.sbatch") == 0o600
    assert (tmp_path / "told").read_text() == f"{VALUE} {VALUE}2 \n"  # the job gets them from sbatch


def test_logs_are_their_owners_and_errors_are_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nprint('begins')\nif os.environ['RANK'] == '1':\n"
        "    raise ValueError('no access with ' + os.environ['API_KEY'])\nimport time\ntime.sleep(99)\n"
    )
    flags = ("--num_gpus", "2", "--export", f"API_KEY={VALUE}", "script.py", "--output-dir", "out")
    done = launch(*flags, cwd=tmp_path)
    assert "no access with ***" in done.stderr and VALUE not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "out/logs").rglob("*") if path.is_file()]
    assert len(files) >= 3 and {mode(path) for path in files} == {0o600}


def test_mistakes_are_told_without_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for exports, text in ((["1KEY=" + VALUE], ""), ([], f"MY TOKEN={VALUE}\n"), ([], f'TOKEN="{VALUE}\n')):
        Path(".deepspeed_env").write_text(text)
        with pytest.raises(ConfigError) as raised:
            environment.asked_for(exports, {})
        assert VALUE not in str(raised.value)


def test_what_looks_like_a_secret() -> None:
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "MY_CREDENTIALS",
        "token",
        "APIKEY",
        "MYTOKEN",
    ):
        assert secret.is_secret(name, "x"), name
    values = ["hf_abcdefgh1234", "sk-abcdefgh1234", "ghp_abcdefgh1234", "AKIAIOSFODNN7EXAMPLE"]
    for value in [*values, "http://me:pw@proxy:80", "-----BEGIN RSA PRIVATE KEY-----"]:
        assert secret.is_secret("PLAIN", value), value
        assert value[6:14] not in secret.masked(f"x {value} y")
    plain = {
        **{"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "KEYBOARD": "us"},
        **{
            "PWD": "/home/me",
            "HF_HOME": "/data/hf_home",
            "HTTP_PROXY": "http://proxy:80",
            "WORD": "task-force",
        },
    }
    assert secret.secrets_of(plain) == {}
