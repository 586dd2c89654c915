"""A recipe's flags are read without running the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.recipes import check_flags, find_recipe, recipe_names
from launcher.errors import ConfigError

RECIPE = '''
"""A recipe."""
from __future__ import annotations
import a_package_that_is_not_there
from launcher.cli.recipe_flags import training_parser
LENGTH, OTHER = 256, a_package_that_is_not_there.value
STEPS: int = 3
SIZE = 7

def flags():
    parser = training_parser("mine", "Does it.")
    parser.add_argument("--size", type=int, default={default})
    return parser

a_package_that_is_not_there.run(flags())
'''


def test_flags_of_a_recipe_are_checked_without_its_imports(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE.format(default="SIZE"))
    check_flags(recipe, ["--size", "3", "--max_steps=4"])
    with pytest.raises(ConfigError, match="--sise") as error:
        check_flags(recipe, ["--sise", "3"])
    assert "did you mean --size?" in str(error.value)
    with pytest.raises(SystemExit):
        check_flags(recipe, ["--help"])


@pytest.mark.parametrize("text", ["print('no flags here')\n", RECIPE.format(default="OTHER")])
def test_a_recipe_that_does_not_tell_is_left_to_its_ranks(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(text)
    check_flags(recipe, ["--anything"])


def test_our_recipes_are_found_by_name_and_by_path() -> None:
    assert {"pretrain", "finetune"} <= set(recipe_names())
    path, ours = find_recipe("pretrain")
    assert ours and find_recipe(str(path)) == (path.resolve(), True)


def test_script_of_the_user_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").touch()
    assert find_recipe(str(tmp_path / "pretrain.py")) == (tmp_path / "pretrain.py", False)
