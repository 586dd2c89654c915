"""Pages are short enough, match the current code, and all their links resolve."""

from __future__ import annotations

import re
import runpy
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launcher import __version__
from launcher.cli.launch_flags import launch_parser
from launcher.config import load
from tests.pages.commands_page import commands_page
from tests.pages.packages import PACKAGE, ROOT

DOCS = ROOT / "docs"
OUTSIDE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
PAGES = [*OUTSIDE, *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]*)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def slugs(page: Path) -> set[str]:
    """Return the anchors of the headings, as Markdown's table of contents generates them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def broken(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.name}: {target} is not there"
        elif page.is_relative_to(DOCS) and not file.is_relative_to(DOCS):
            yield f"{page.name}: {target} is not on the site; name its path as code"
        elif anchor and file.suffix == ".md" and anchor not in slugs(file):
            yield f"{page.name}: {target}: there is no such heading"


def test_every_link_leads_somewhere() -> None:
    assert [problem for page in PAGES for problem in broken(page)] == []


def test_every_page_is_in_the_navigation_once() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            yield from pages(list(entry.values()))
        elif isinstance(entry, list):
            for one in entry:
                yield from pages(one)

    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    there = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(pages(site["nav"])) == there


@pytest.mark.parametrize(("page", "most"), [("README.md", 200), ("docs/architecture.md", 300)])
def test_front_pages_stay_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_tables_of_the_front_page_fit_a_terminal() -> None:
    shown = re.sub(r"\]\([^)]*\)|[`*\[]", "", (ROOT / "README.md").read_text())  # as rendered
    assert [line for line in shown.splitlines() if line.startswith("|") and len(line) > 80] == []


def test_the_size_that_is_told_is_about_right() -> None:
    def lines(*packages: str) -> int:
        return sum(
            len(path.read_text().splitlines())
            for package in packages
            for path in (PACKAGE / package).rglob("*.py")
        )

    for page in ("README.md", "docs/architecture.md"):
        text = " ".join((ROOT / page).read_text().split())
        told = re.search(r"([\d,]+) lines.*?; its core, `zero/` and `engine/`, has ([\d,]+)", text)
        assert told is not None
        everything, core = (int(number.replace(",", "")) for number in told.groups())
        assert everything == pytest.approx(lines("."), rel=0.1) and core == pytest.approx(
            lines("zero", "engine"), rel=0.1
        )


def test_what_forges_and_libraries_read() -> None:
    """Issue templates and CITATION.cff are YAML with the required fields, and of this version."""
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        if path.stem == "config":
            continue
        assert template["name"] and template["description"], path
        asked = [field for field in template["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in asked}) == len(asked) > 0, path
        assert all(field["attributes"]["label"] for field in asked), path
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0" and citation["authors"]


def test_the_page_of_commands_is_of_today() -> None:
    assert (DOCS / "reference" / "cli.md").read_text() == commands_page(), "run: python -m tests.pages"


def test_the_guides_name_flags_that_there_are() -> None:
    recipes = [runpy.run_path(str(ROOT / "recipes" / f"{name}.py")) for name in ("pretrain", "finetune")]
    own = {flag for recipe in recipes for flag in recipe["flags"]().known_flags()}
    known = {*launch_parser().known_flags(), *own}
    tables = [
        line
        for name in ("running", "clusters")
        for line in (DOCS / "guides" / f"{name}.md").read_text().splitlines()
        if line.startswith("| `-")
    ]
    named = {flag for line in tables for flag in re.findall(r"--[\w-]+", line.split(" | ")[0])}
    assert len(named) > 40 and named - known == set()


def test_whole_configurations_of_the_guides_are_taken() -> None:
    examples = [
        text
        for page in (DOCS / "guides").glob("*.md")
        for text in re.findall("^```json\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(examples) >= 4
    for text in examples:
        load(text if text.startswith("{") else f"{{{text}}}")
