"""Flags: both spellings work, and no mistake is silent."""

from __future__ import annotations

import pytest

import launcher
from launcher.cli.flags import FlagParser, value_of
from launcher.cli.launch_flags import launch_parser, refuse_unsupported, split_argv
from launcher.cli.main import main
from launcher.cli.recipe_flags import training_parser
from launcher.cli.recipes import check_flags, find_recipe
from launcher.errors import ConfigError


@pytest.mark.parametrize(
    "tokens", [["--max-steps", "3"], ["--max_steps", "3"], ["--max-steps=3"], ["--max_steps=3"]]
)
def test_dashes_and_underscores_are_the_same(tokens: list[str]) -> None:
    assert training_parser("pretrain", "").parse_args(tokens).max_steps == 3
    assert value_of(["--seed", "1", *tokens], "--max-steps") == "3"


def test_every_launcher_flag_has_both_spellings() -> None:
    parser = launch_parser()
    for flag in parser.known_flags():
        assert parser.canonical(flag.replace("_", "-") if flag.startswith("--") else flag) == flag


def test_launcher_flags_end_at_the_recipe() -> None:
    own, recipe = split_argv(
        launch_parser(), ["--config", "a.json", "--num-gpus=2", "-q", "pretrain", "--config", "b", "--x"]
    )
    assert own == ["--config", "a.json", "--num-gpus=2", "-q"]
    assert recipe == ["pretrain", "--config", "b", "--x"]
    assert split_argv(launch_parser(), ["--config", "a.json"]) == (["--config", "a.json"], [])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num_gpu", "2"], "did you mean --num_gpus?"),
        (["--confg", "x"], "did you mean --config?"),
        (["--max_steps", "3"], "a recipe's flags come after its name"),
        (["--nproc-per-node", "2"], "write --num_gpus N"),
        (["--num_processes=2"], "write --num_gpus N"),
        (["--config_file", "a.yaml"], "write --config DS.json"),
        (["-m", "package.train"], "write --module"),
    ],
)
def test_unknown_launcher_flag_says_what_to_write(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="unknown flag") as error:
        split_argv(launch_parser(), argv)
    assert said in str(error.value)


def test_a_flag_of_the_launcher_behind_the_recipe_is_told_its_place() -> None:
    with pytest.raises(
        ConfigError, match=r"write it before the recipe.s name: `launch --num_gpus \.\.\. pretrain"
    ):
        check_flags(find_recipe("pretrain")[0], ["--max-steps", "3", "--num-gpus", "2"])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"launcher {launcher.__version__}\n"


@pytest.mark.parametrize(
    "argv", [["--num_gpus", "0"], ["--num_gpus", "x"], ["--master_port", "70000"], ["--config"]]
)
def test_wrong_value_is_an_error(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        launch_parser().parse_args(argv)


@pytest.mark.parametrize("argv", [["--autotuning", "run"], ["--save_pid"]])
def test_flags_that_are_not_there_yet_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="is not implemented yet"):
        refuse_unsupported(launch_parser().parse_args(argv))


def test_abbreviations_are_not_guessed() -> None:
    parser = FlagParser(prog="x")
    parser.add_argument("--output-dir")
    with pytest.raises(ConfigError):
        parser.parse_args(["--output", "d"])


def test_value_of_takes_the_last_and_may_be_absent() -> None:
    assert value_of(["--output_dir", "a", "--output-dir=b"], "--output-dir") == "b"
    assert value_of(["--output-dirs", "a"], "--output-dir") is None
    assert value_of(["--output-dir"], "--output-dir") is None
