"""docs/config.md matches the schema."""

from pathlib import Path

from launcher.config import Config
from launcher.config.schema import implemented_paths, known_paths
from tests.pages.keys_page import keys_page

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_in_step() -> None:
    assert PAGE.read_text() == keys_page(), "run: python -m tests.pages"


def test_every_key_is_on_it() -> None:
    text = keys_page()
    for path in (*implemented_paths(Config), *known_paths()):
        own = f"`{path.rpartition('.')[2]}`" in text or f"`{path}`" in text
        assert own or f"`{path}." in text or f"`{path}.[" in text, path  # a section is listed by its members
