"""Every environment variable of the launcher is on its page, and every one on the page is in the code."""

from __future__ import annotations

import re

from tests.pages.packages import PACKAGE, ROOT

NAME = re.compile(r"\bLAUNCHER_[A-Z_]+\b")


def test_all_variables_are_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(rf"\"({NAME.pattern})\"", source)) == set(NAME.findall(page))
    for name in re.findall(r"`([A-Z]+_[A-Z_]+)`", page.partition("## Set for ranks")[2]):
        assert f'"{name}"' in source, name
