"""The structure described in docs/architecture.md: imports go downwards, and every module states its purpose."""

from __future__ import annotations

from tests.pages.files_page import files_page, imports_table
from tests.pages.packages import (
    FILES,
    INSIDE,
    ORDER,
    ROOT,
    imported_folders,
    imported_packages,
    package_of,
    purpose,
)


def test_every_room_has_its_place() -> None:
    packages = {package_of(path) for path in FILES} - {"__init__"}
    assert packages == set(ORDER), "give it its place in ORDER (tests/pages/packages.py)"


def test_packages_import_downwards() -> None:
    place = {package: index for index, package in enumerate(ORDER)}
    upwards = [
        f"{path} imports {package}"
        for path in FILES
        if package_of(path) in place
        for package in sorted(set(imported_packages(path)))
        if place.get(package, -1) > place[package_of(path)]
    ]
    assert upwards == []


def test_folders_inside_a_package_import_downwards() -> None:
    upwards = []
    for path in FILES:
        order = INSIDE.get(package_of(path), [])
        if order and len(path.parts) > 2:
            own = order.index(path.parts[1])
            upwards += [
                f"{path} imports {name}/" for name in imported_folders(path) if order.index(name) > own
            ]
    assert upwards == []


def test_every_module_says_what_it_is_for() -> None:
    assert [str(path) for path in FILES if not purpose(path)] == []


def test_no_file_is_too_long_to_read_at_once() -> None:
    lines = {path: len((ROOT / "launcher" / path).read_text().splitlines()) for path in FILES}
    assert [f"{path}: {count} lines" for path, count in lines.items() if count > 400] == []


def test_the_page_of_files_is_of_today() -> None:
    page = ROOT / "docs" / "design" / "files.md"
    assert page.read_text() == files_page(), "run: python -m tests.pages"


def test_the_table_of_imports_is_of_today() -> None:
    assert imports_table() in (ROOT / "docs" / "architecture.md").read_text(), "run: python -m tests.pages"
