"""Writes docs/deepspeed_api.md: every public name of DeepSpeed's, and what is here of it.

    python -m tests.parity_deepspeed.api_names     # first, where DeepSpeed has changed
    python -m tests.parity_deepspeed.api_page

The names are those of `api_names.json`, the verdicts those of launcher/integrations.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from launcher.integrations import surface
from launcher.integrations.only_called import only_called
from launcher.integrations.refused import Refusal, refusal_of
from tests.parity_deepspeed.differs import difference_of
from tests.parity_deepspeed.imported_names import ACCELERATOR, read

NAMES = Path(__file__).with_name("api_names.json")
PAGE = Path(__file__).parents[2] / "docs/deepspeed_api.md"
SAME, DIFFERS, REFUSED, WHEN_CALLED = "same", "differs", "refused", "refused when called"
WIDTH = 118

HEAD = """\
# DeepSpeed's Python, name by name

`launch` gives scripts a package named `deepspeed`: the names of DeepSpeed 0.19.8, on launcher's engine
([transformers.md](transformers.md)). This page lists its public names and what is here of each. It is written by
`python -m tests.parity_deepspeed.api_page` from the tables that the package itself answers from.

- **same**: it does what it does there.
- **differs**: it is here, and differs in what the sentence says.
- **refused**: asking for it raises an error that says the same as this page. *When called*: it can be imported, and
  is an error when it is called.

Public is what a module defines without an underscore, what a package takes from its modules, and whatever one of
{projects} projects takes from there (tests/parity_deepspeed/imported_names.tsv). Modules of which nothing is here
stand at the end, each with one verdict for all of it.
"""


class Verdict(NamedTuple):
    """What is here of a name."""

    kind: str
    refusal: Refusal | None = None
    how: str = ""


def names() -> dict[str, list[str]]:
    """Module -> its public names; `module.Class.` -> members."""
    return dict(json.loads(NAMES.read_text()))


def verdict(module: str, name: str) -> Verdict:
    """Of one name; `module` as in `names`."""
    path = f"{module.removesuffix('.')}.{name}" if module else name
    if module.endswith("."):
        found = name in members(module)
    else:
        if only_called(module, name) is not None and name not in surface.NAMES.get(module, {}):
            return Verdict(WHEN_CALLED, refusal_of(path))
        found = is_here(module, name)
    if not found:
        return Verdict(REFUSED, refusal_of(path))
    how = difference_of(path)
    if module.endswith(".") and how == difference_of(module.removesuffix(".")):
        how = ""  # said of the class
    return Verdict(DIFFERS, how=how) if how else Verdict(SAME)


def is_here(module: str, name: str) -> bool:
    """Whether the package has a name; modules are not imported for it."""
    if (f"{module}.{name}" if module else name) in surface.MODULES:
        return True
    try:
        surface.look_up(module, name)
    except surface.NotHere:
        return False
    return True


@cache
def members(path: str) -> frozenset[str]:
    """What there is of a class here: its attributes, and those that its methods set."""
    kinds, more = _counterparts()[path]
    found = set(more)
    for kind in kinds:
        for base in kind.__mro__:
            if base.__module__.startswith(("launcher", "torch")):
                found |= set(vars(base)) | set(getattr(base, "__annotations__", {}))
            if base.__module__.startswith("launcher"):
                for line in re.findall(
                    r"^ +((?:self\.\w+(?:: [^=\n]+)?,? ?)+= ?)", inspect.getsource(base), re.M
                ):
                    found |= set(re.findall(r"self\.(\w+)", line))
                for block in re.findall(r"^ +\(\n((?: +self\.\w+,\n)+)", inspect.getsource(base), re.M):
                    found |= set(re.findall(r"self\.(\w+)", block))
                found |= set(re.findall(r"self\.(\w+)(?=(?:, self\.\w+)* = )", inspect.getsource(base)))
    return frozenset(found)


@cache
def _counterparts() -> Mapping[str, tuple[tuple[type, ...], frozenset[str]]]:
    from launcher.config import ZeroConfig
    from launcher.engine import Engine
    from launcher.integrations import accelerator, configuration, grid, marks
    from launcher.optim.sharded import ShardedOptimizer
    from launcher.pipe import PipelineModule, ProcessTopology

    engine: tuple[tuple[type, ...], frozenset[str]] = ((Engine,), frozenset())
    optimizer: tuple[tuple[type, ...], frozenset[str]] = (
        (ShardedOptimizer,),
        frozenset(("param_groups", "state", "defaults")),
    )
    zero = {key.removeprefix("stage3_") for key in ZeroConfig.model_fields} | set(ZeroConfig.model_fields)
    config = {*configuration.PATHS, *configuration.SECTIONS, *configuration.DTYPE_KEYS, *configuration.BATCH}
    return {
        "runtime.engine.DeepSpeedEngine.": engine,
        "runtime.pipe.engine.PipelineEngine.": engine,
        "runtime.pipe.module.PipelineModule.": ((PipelineModule,), frozenset()),
        "runtime.pipe.topology.PipelineParallelGrid.": ((grid.PipelineParallelGrid,), frozenset()),
        "runtime.pipe.topology.ProcessTopology.": ((ProcessTopology,), frozenset()),
        "runtime.config.DeepSpeedConfig.": ((configuration.DeepSpeedConfig,), frozenset(config)),
        "runtime.zero.config.DeepSpeedZeroConfig.": ((), frozenset(zero)),
        "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.": optimizer,
        "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.": optimizer,
        "accelerator.abstract_accelerator.DeepSpeedAccelerator.": (
            (accelerator.Accelerator,),
            frozenset({*accelerator.TENSORS, *accelerator.ANSWERS, *accelerator.ON_CPU}),
        ),
        "parameter.": ((), frozenset({*marks.SHARDED, *marks.ALL, "ds_summary", "ds_external_parameters"})),
    }


def detailed(module: str) -> bool:
    """Whether a module is listed name by name."""
    return module.endswith(".") or module in surface.MODULES


# ---- the names that projects use --------------------------------------------------------------------


def verdict_of_use(name: str) -> Verdict | None:
    """Of a name of `imported_names.tsv`; None where DeepSpeed 0.19.8 has no such name."""
    known = names()
    if name.startswith(f"{ACCELERATOR}()."):
        home, rest = "accelerator.abstract_accelerator.DeepSpeedAccelerator.", name.rpartition(".")[2]
        return verdict(home, rest) if rest in {*known[home], "_name"} else None
    parts = name.split(".")
    home = next(".".join(parts[:n]) for n in range(len(parts), -1, -1) if ".".join(parts[:n]) in known)
    rest = parts[len(home.split(".")) if home else 0 :]
    if not rest:
        return Verdict(SAME) if home in surface.MODULES else Verdict(REFUSED, refusal_of(home))
    if rest[0] not in known[home] and not is_here(home, rest[0]):
        return None
    return verdict(home, rest[0])


def uses() -> tuple[int, int, int, int]:
    """What projects use: names, those that are here, name x project, those that are here."""
    counts = [0, 0, 0, 0]
    for name, projects in read().items():
        found = verdict_of_use(name)
        if found is None:
            continue
        here = found.kind in (SAME, DIFFERS)
        counts = [
            counts[0] + 1,
            counts[1] + here,
            counts[2] + len(projects),
            counts[3] + here * len(projects),
        ]
    return counts[0], counts[1], counts[2], counts[3]


# ---- the page -----------------------------------------------------------------------------------------


def render() -> str:
    """The page."""
    listed, wholes = names(), []
    counts: Counter[str] = Counter()
    sections: list[str] = []
    for module, entries in sorted(listed.items()):
        if not detailed(module):
            wholes.append(module)
            continue
        if not entries:
            continue
        found = {name: verdict(module, name) for name in entries}
        counts.update(one.kind for one in found.values())
        sections.append(_section(module, found))
    projects = {project for users in read().values() for project in users}
    all_, here, weighed, weighed_here = uses()
    figures = (
        f"Of {sum(counts.values())} names in modules that are here, {counts[SAME]} are the same, {counts[DIFFERS]} "
        f"differ, {counts[WHEN_CALLED]} are refused when they are called and {counts[REFUSED]} when they are asked "
        f"for: most of these are the inside of DeepSpeed's engine. Of the {all_} names that projects use and that "
        f"DeepSpeed 0.19.8 has, {here} are here ({here / all_:.0%}); counted once for each project that uses it, "
        f"{weighed_here} of {weighed} ({weighed_here / weighed:.0%})."
    )
    figures = "\n".join(_wrapped(figures, indent="")) + "\n"
    text = [HEAD.format(projects=len(projects)), figures, *sections, _wholes(wholes)]
    return "\n".join(text)


def _section(module: str, found: Mapping[str, Verdict]) -> str:
    title = f"deepspeed.{module.removesuffix('.')}" if module else "deepspeed"
    if module == "parameter.":
        title = "attributes of parameters"
    elif module.endswith("."):
        title += ": methods and attributes"
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, one in found.items():
        groups[one.kind, one.how or _reason(one.refusal)].append(name)
    order = (SAME, DIFFERS, WHEN_CALLED, REFUSED)
    lines = [f"## {title}\n"]
    for (kind, why), members_ in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
    ):
        text = f"- **{kind}**{f' ({why})' if why else ''}: {', '.join(f'`{name}`' for name in members_)}"
        lines += _wrapped(text)
    return "\n".join(lines) + "\n"


def _wholes(modules: list[str]) -> str:
    lines = ["## Modules of which nothing is here\n"]
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        groups[_reason(refusal_of(module))].append(module)
    for why, members_ in sorted(groups.items(), key=lambda item: item[1][0]):
        lines += _wrapped(f"- **refused** ({why}): {', '.join(f'`{name}`' for name in members_)}")
    return "\n".join(lines) + "\n"


def _reason(refusal: Refusal | None) -> str:
    if refusal is None:
        return ""
    return f"{refusal.why}; {refusal.instead}" if refusal.instead else refusal.why


def _wrapped(text: str, indent: str = "  ") -> list[str]:

    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(render())
    print(uses())
