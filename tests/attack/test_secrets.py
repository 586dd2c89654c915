"""Secrets: files stay readable only by their owner, and values appear in no file or output that others can read."""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.cli.manifest import print_manifest
from launcher.cli.submit import by_name
from launcher.cluster import environment, frames, hang, secret, terminal
from launcher.cluster.store import SyncedCopy
from launcher.cluster.sync_manifest import pack
from launcher.errors import ConfigError
from launcher.run import Run
from tests.cluster.launching import launch
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool

VALUE = "not-for-others-4711"
BODY = ("b3BlbnNzaC1rZXk" * 4, "QyNTUxOQAAACDl" * 4, "AAAE=")
KEY = "\n".join(("-----BEGIN OPENSSH PRIVATE KEY-----", *BODY, "-----END OPENSSH PRIVATE KEY-----"))
PATTERNS = {
    **{"value of a secret": secret._VALUES, "escape sequence": terminal.ESCAPE_SEQUENCE},
    **{"frame": frames._FRAME, "frame of a thread": hang._FRAME, "assignment": environment._ASSIGNMENT},
    **{"hint": secret._HEX, "random": secret._RANDOM, "setting": secret._SETTING},
}
"""Those that meet texts of ranks, peers and files."""
SEARCHED = ("value of a secret", "escape sequence", "setting")


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
        store = SyncedCopy(parcel.manifest(), tmp_path / "there")
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
    done = launch(*flags, "script.py", "API_KEY=mine", "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/launch.sbatch").read_text()
    assert VALUE not in text + done.stdout + done.stderr
    assert "--export API_KEY --export=HF_TOKEN --export PLAIN=word" in text
    assert "script.py API_KEY=mine" in text  # what the script is told stays as it is
    assert mode(tmp_path / "out/launch.sbatch") == 0o600
    assert (tmp_path / "told").read_text() == f"{VALUE} {VALUE}2 \n"  # the job gets them from sbatch


def test_a_value_that_another_replaces_is_a_secret_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [
        "-q",
        "--export",
        "API_KEY=first",
        "--export=WORD=a",
        "--num_nodes",
        "2",
        "--export",
        "API_KEY=last",
        "-q",
    ]
    kept = ["-q", "--export=WORD=a", "--num_nodes", "2", "--export", "API_KEY", "-q"]
    assert by_name(own, {"API_KEY": "last"}) == kept
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    Path(".deepspeed_env").write_text(f"API_KEY={VALUE}-0\n")
    exports = ("--export", f"API_KEY={VALUE}-1", "--export", f"API_KEY={VALUE}-2")
    for submit in ((), ("--submit=", "--num_nodes", "2")):
        main(["--dry_run", *submit, *exports, "script.py", *(f"{VALUE}-{n}" for n in range(3))])
        said = "".join(capsys.readouterr())
        assert VALUE not in said and said.count("***") >= 3


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
    status = (tmp_path / "out/logs/status.json").read_text()
    assert "no access with ***" in status and "API_KEY=***" in status and VALUE not in status


def test_mistakes_are_told_without_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for exports, text in ((["1KEY=" + VALUE], ""), ([], f"MY TOKEN={VALUE}\n"), ([], f'TOKEN="{VALUE}\n')):
        Path(".deepspeed_env").write_text(text)
        with pytest.raises(ConfigError) as raised:
            environment.asked_for(exports, {})
        assert VALUE not in str(raised.value)


LOOKS = {
    **dict.fromkeys(
        ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_CREDENTIALS", "token", "APIKEY"), "x"
    ),
    **dict.fromkeys(
        ("MYTOKEN", "hfToken", "HF-TOKEN", "X_TOKENS2", "PGPASS", "MYSQL_PWD", "SSHKEY", "NETRC"), "x"
    ),
    **{"GH_PAT": "abcdefgh1234", "MYKEYRING": "0123456789abcdef" * 2 + "01234567"},
}
TOKENS = {
    **{token: token[6:14] for token in (
        *("hf_abcdefgh1234", "sk-abcdefgh1234", "sk-ant-abcdefgh", "ghp_abcdefgh1234", "AKIAIOSFODNN7EXAMPLE"),
        *("sk_live_abcdefgh12345678", "rk_live_abcdefgh12345678", "Bearer abcdefghijklmnop", "glpat-abcdefgh1234"),
        *("-----BEGIN RSA PRIVATE KEY-----", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl"),
    )},
    "http://me:pass@proxy:80": "pass", "redis://:pa/ss@host": "/ss", "postgres://me:p@ss@host/db": "ss@",
    "?sv=2020&sig=abcdefgh%3D": "abcd", "https://hooks.slack.com/services/T0/B0/abcdefghijk": "abcd",
    "https://discord.com/api/webhooks/1/abcdefghij": "abcd", "AccountName=a;AccountKey=abcdefgh==;": "abcd",
    "https://0123456789abcdef@o1.ingest.sentry.io/1": "0123", "machine host login me password abcdefg": "abcd",
    KEY: BODY[1],
}  # fmt: skip
"""What looks so -> what nobody may see of it."""
PLAIN = {
    **{"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "PATH": "/usr/bin", "KEYBOARD": "us"},
    **{"PWD": "/home/me", "OLDPWD": "/home/me", "HF_HOME": "/data/hf_home", "HTTP_PROXY": "http://proxy:80"},
    **{
        "WORD": "task-specific-words",
        "MAX_TOKENS": "100000",
        "CACHE": "/data/hf_checkpoints",
        "FILE_PAT": "*.txt",
    },
    **{
        "NPM": "npm_config_registry",
        "COMMIT": "0123456789abcdef" * 2 + "01234567",
        "URL": "http://host:80/a@b",
    },
    **{"REPOSITORY": "git+ssh://git@github.com/me/it.git@v1", "COMET_EXPERIMENT_KEY": "a1" * 16},
    **{"TEXT": "the bearer of good news", "TOKENIZER": "meta-llama-3.1-8b-instruct"},
}


def test_what_looks_like_a_secret() -> None:
    for name, value in LOOKS.items():
        assert secret.is_secret(name, value), name
    for value, part in TOKENS.items():
        assert secret.is_secret("PLAIN", value), value
        for text in (
            f"x {value} y",
            f"x={value}",
            repr({"x": [f"\n{value}"]}),
            json.dumps({"x": f"\n{value}"}),
        ):
            assert part not in secret.masked(text), text
    assert secret.secrets_of(PLAIN) == {}
    assert [secret._VALUES.sub("***", value) for value in PLAIN.values()] == list(PLAIN.values())


def test_settings_are_not_taken_for_secrets_as_easily() -> None:
    tokens = ["--hf_token", "any", "--api-key=any", "db.password=any", "x", "--auth-token", "any"]
    assert dict(secret.secret_arguments(tokens)).keys() == {
        "--hf_token",
        "--api-key",
        "db.password",
        "--auth-token",
    }
    plain = [
        "--pad_token",
        "<pad>",
        "--text_key",
        "text",
        "--max-tokens",
        "9",
        "--token_file",
        "a",
        "--use_auth_token",
    ]
    assert list(secret.secret_arguments([*plain, "--seed", "3", "--hub_token", "--fp16"])) == []


@pytest.mark.parametrize(
    "value",
    [f"it's\"{VALUE}", f"{VALUE}\\back", f"{VALUE}\n  second-{VALUE}", f"\u00e4\u00e9\x1b{VALUE}", KEY],
)
def test_a_hidden_value_is_hidden_however_it_is_printed(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_hidden", set())
    secret.hide([value])
    told = [
        str,
        repr,
        ascii,
        json.dumps,
        shlex.quote,
        lambda v: repr(json.dumps({"k": v})),
        lambda v: f"it's {[v]!r}",
    ]
    told.append(lambda v: json.dumps({"k": v}, ensure_ascii=False))
    told.append(lambda v: v.replace("\n", "\n      "))
    for tell in told:
        said = secret.masked(f"no access with {tell(value)} now")
        assert not any(line[:8] in said for line in (VALUE, *KEY.splitlines()[1:3])), said
        assert said.startswith("no access with") and said.endswith("now")


def test_inherited_secrets_are_hidden_and_what_people_need_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_hidden", set())
    for name, value in {"API_KEY": VALUE, "SSH_AUTH_SOCK": "/tmp/socket", "PIN_TOKEN": "12345678"}.items():
        monkeypatch.setenv(name, value)
    main(["--version"])
    assert secret.masked(f"{VALUE} /tmp/socket 12345678") == "*** /tmp/socket 12345678"


PIECES = ("eyJ", "eyJa", "://", "://a:", "://:x", "hf_", "hf_a", "sk-", "sk-a-", "SG.", f"SG.{'a' * 17}", "AKIA", "-",
          "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", f"{'A' * 76}\n", "machine ", "machine a login b password ",
          "bearer ", "authorization: ", "\\n", "\\neyJ", "?sig=", ";pwd=", "discord.com/api/", "%3D", "0", "a", " ",
          "\x1b]", "\x1b[0", '  File "a", line 1', '", line 1', "A=", "A= #", "'", '"', "A='", 'A="',
          "_KEY")  # fmt: skip


def test_every_pattern_is_linear(subtests: pytest.Subtests) -> None:
    """Measure the time for 200 kB; a quadratic pattern takes ten seconds or more."""
    for name, pattern in PATTERNS.items():
        with subtests.test(name):
            whole = pattern.sub if name in SEARCHED else lambda _, text, found=pattern: found.match(text)
            for piece in PIECES:
                text: Any = "A=" * (name == "assignment") + piece * (200_000 // len(piece)) + "!"
                text = text.encode() if isinstance(pattern.pattern, bytes) else text
                began = time.process_time()
                whole(text[:0], text)
                assert time.process_time() - began < 1, piece


def test_a_manifest_holds_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    (tmp_path / "comet.json").write_text(json.dumps({"comet": {"api_key": VALUE}}))
    (tmp_path / "comment.json").write_text("{ // ghp_abcdefgh1234\n}")
    pods = ("--kind", "jobset", "--num_nodes", "1", "--num_gpus", "1", "--module", "--image")
    for more in (
        ("i", "--config", str(tmp_path / "comet.json"), "m"),
        ("i", "--config", str(tmp_path / "comment.json"), "m"),
        ("i", "m", "--hf_token", VALUE),
        ("i", "m", f"model.api_key={VALUE}"),
        ("i", "m", "--url", f"http://me:{VALUE}@host"),
        ("i", "--export", f"WORD=hf_{VALUE}4711abcd", "--export", f"API_KEY={VALUE}", "m"),
        (f"http://me:{VALUE}@host/image", "m"),
        ("i", "--secret", f"API_KEY={VALUE}/=", "m"),
    ):
        with subtests.test(more[-2:]), pytest.raises(ConfigError) as raised:
            print_manifest([*pods, *more])
        assert "ghp_" not in str(raised.value)
    assert capsys.readouterr().out == ""
    assert print_manifest([*pods, "i", "m", "--pad_token", "<pad>", "--text_key", "text"]) == 0


def save_with_a_key(ctx: RankContext, directory: Path) -> Any:
    comet = {"enabled": False, "api_key": VALUE, "experiment_key": "a1" * 16}
    engine = engine_of(config_of(1, 1, comet=comet))
    advance(engine, ctx, range(1))
    engine.save_checkpoint(directory)
    again = engine_of(config_of(1, 1, comet=comet))
    again.load_checkpoint(directory)
    return engine.config["comet"]["api_key"], again.config["comet"]["api_key"]


def test_files_of_a_run_have_no_key_and_the_run_has(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(save_with_a_key, 1, tmp_path)[0] == (VALUE, VALUE)
    run: Any = SimpleNamespace(
        rank=0, replica=0, output_dir=tmp_path, args=SimpleNamespace(hub_token=VALUE, seed=3)
    )
    Run.write_config(run, {"comet": {"api_key": VALUE, "project": "p"}, "notes": ["hf_" + "a1" * 9]})
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "comet": {"api_key": "***", "project": "p"},
        "notes": ["***"],
    }
    assert json.loads((tmp_path / "flags.json").read_text()) == {"hub_token": "***", "seed": 3}
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 4 and not any(VALUE.encode() in text for text in texts)
    assert any(b"a1" * 16 in text for text in texts)  # the experiment's key is no secret
