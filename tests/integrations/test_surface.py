"""Every public DeepSpeed name has a verdict, and the page, the tables and the package agree."""

from __future__ import annotations

import pytest

from launcher.integrations import surface
from launcher.integrations.only_called import ONLY_CALLS, only_called
from launcher.integrations.refused import REFUSED, NoSuchModule, NotHere, refusal_of
from launcher.integrations.served import NAMES
from launcher.integrations.whole_modules import WHOLE_MODULES
from tests.parity_deepspeed import api_page
from tests.parity_deepspeed.api_page import DIFFERS as DIFFERENT
from tests.parity_deepspeed.api_page import REFUSED as REFUSES
from tests.parity_deepspeed.api_page import SAME, WHEN_CALLED, verdict
from tests.parity_deepspeed.differs import DIFFERS


def test_the_page_is_what_the_tables_say() -> None:
    assert api_page.PAGE.read_text() == api_page.render(), "run python -m tests.parity_deepspeed.api_page"


def test_every_name_has_a_verdict_with_a_reason() -> None:
    """An unavailable name is in a table, by itself or by its module; none is missing."""
    lost = []
    for module, names in api_page.names().items():
        for name in names if api_page.detailed(module) else ():
            found = verdict(module, name)
            if found.kind in (REFUSES, WHEN_CALLED) and (found.refusal is None or not found.refusal.why):
                lost.append(f"{module}.{name}")
            if found.kind in (REFUSES, WHEN_CALLED) and found.refusal == refusal_of(
                "nothing that anybody knows"
            ):
                lost.append(f"{module}.{name}")
    assert lost == []


def test_a_refused_name_says_what_the_page_says() -> None:
    wrong = []
    for module, names in api_page.names().items():
        if module.endswith(".") or not api_page.detailed(module):
            continue
        for name in names:
            found = verdict(module, name)
            if found.kind != REFUSES:
                continue
            assert found.refusal is not None
            with pytest.raises(NotHere) as error:
                surface.look_up(module, name)
            if found.refusal.why not in str(error.value) or found.refusal.instead not in str(error.value):
                wrong.append(f"{module}.{name}")
    assert wrong == []


def test_what_is_refused_when_called_can_be_imported_and_not_called() -> None:
    for module, names in ONLY_CALLS.items():
        for name in names:
            stand_in = only_called(module, name)
            assert isinstance(stand_in, type) and not isinstance(3, stand_in)
            with pytest.raises(NotHere, match=name):
                stand_in(1, two=2)
            with pytest.raises(NotHere, match=name):
                stand_in.anything_of_it  # noqa: B018


def test_names_of_experts_and_sequences_can_be_imported() -> None:
    """Models import them whether they use them or not."""
    lacking = [
        f"{module}.{name}"
        for module, names in api_page.names().items()
        for name in names
        if module.partition(".")[0] in ("moe", "sequence") and name[:1].isalpha() and not name.isupper()
        if name != "logger" and not name.startswith("Test")
        if verdict(module, name).kind == REFUSES
    ]
    assert lacking == []


def test_a_module_that_is_not_here_says_why() -> None:
    finder = surface._Finder()
    with pytest.raises(NoSuchModule, match="the autotuner is not available") as error:
        finder.find_spec("deepspeed.autotuning", None)
    assert "launch plan" in str(error.value) and "--no_deepspeed_shim" in str(error.value)


def test_tables_have_no_line_for_nothing() -> None:
    """A line of DIFFERS is about an available name; a line of REFUSED about an unavailable one."""
    known = {
        f"{module.removesuffix('.')}.{name}".lstrip(".")
        for module, names in api_page.names().items()
        for name in names
    }
    used = {surface_name.partition("().")[0] for surface_name in api_page.read()}
    modules = set(surface.MODULES) | set(api_page.names())
    idle = [
        name for name in DIFFERS if name not in known | used | modules and name.partition(".")[0] != "zero"
    ]
    assert idle == []
    assert [module for module in (*NAMES, *WHOLE_MODULES) if module not in surface.MODULES] == []
    here = [
        name
        for name in REFUSED
        if "." in name
        and name.rpartition(".")[0] in surface.MODULES
        and name not in modules
        and verdict(name.rpartition(".")[0], name.rpartition(".")[2]).kind in (SAME, DIFFERENT)
        and name not in {path.removesuffix(".") for path in api_page.names()}
    ]
    assert here == []


def test_what_projects_use_is_here() -> None:
    """Every name has a verdict, and most of those that DeepSpeed 0.19.8 still has work."""
    names, here, weighed, weighed_here = api_page.uses()
    assert names > 400 and here / names > 0.85 and weighed_here / weighed > 0.91


def test_the_package_tells_its_version_in_parts() -> None:
    parts = [surface.look_up("", f"__version_{part}__") for part in ("major", "minor", "patch")]
    assert ".".join(map(str, parts)) == surface.look_up("", "__version__")
    assert surface.look_up("", "__git_hash__") and surface.look_up("", "__git_branch__")
