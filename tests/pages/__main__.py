"""Generates pages from the code:  python -m tests.pages

docs/design/files.md and the table of imports in docs/architecture.md come from the modules, docs/reference/cli.md from
the parsers, docs/config.md from the schema.
"""

from __future__ import annotations

from tests.pages.commands_page import commands_page
from tests.pages.files_page import files_page, with_imports_table
from tests.pages.keys_page import keys_page
from tests.pages.packages import ROOT

DOCS = ROOT / "docs"


def main() -> None:
    (DOCS / "design" / "files.md").write_text(files_page())
    (DOCS / "reference" / "cli.md").write_text(commands_page())
    (DOCS / "config.md").write_text(keys_page())
    page = DOCS / "architecture.md"
    page.write_text(with_imports_table(page.read_text()))


if __name__ == "__main__":
    main()
