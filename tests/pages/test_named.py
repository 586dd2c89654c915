"""Files, classes and functions named on the pages exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.pages.packages import PACKAGE, ROOT

DOCS = ROOT / "docs"
FOLDERS = ("launcher", "tests", "benchmarks", "recipes", "examples", "docs")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w.]+/)*\w+\.(?:py|json|tsv)\b")
THEIR_TESTS = re.compile(r"^## DeepSpeed's own unit tests$.*?(?=^## )", re.MULTILINE | re.DOTALL)
CAMEL = re.compile(r"(?<![\w.\"-])[A-Z][a-z]\w*")
# Generated from DeepSpeed's names, or about files of other programs.
NOT_OURS = {"deepspeed_api.md", "config.md", "transformers.md", "files.md", "cli.md"}
# Files of runs, users and other programs.
THEIRS = {
    "ds_config.json", "config.json", "generation_config.json", "summary.json", "flags.json", "meta.json", "old.json",
    "schedule.json", "device.json", "ds.json", "train.py", "my_script.py", "zero_to_fp32.py", "aio.json", "RUN.json",
    "logs/status.json", "RECIPE.py", "SCRIPT.py", "DS.json", "OUT.json", "NAME.py", "FILE.json", "x.py", "new.json",
    "data.py",
}  # fmt: skip
OUTSIDE = {  # words of Python, classes of torch, transformers, DeepSpeed and Kubernetes, and keys
    "None", "True", "False",
    "DistributedSampler", "FlopCounterMode", "AdamW", "PyTorchJob", "JobSet", "ConfigMap", "LinearLR", "OneCycle",
    "WarmupLR", "WarmupCosineLR", "LRRangeTest", "OneBitAdam", "DeepSpeedCPUAdam", "TensorBoard", "SmolLM2",
}  # fmt: skip


def spans() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        if page.name not in NOT_OURS:
            yield from ((page, span) for span in SPAN.findall(THEIR_TESTS.sub("", page.read_text())))


def there() -> set[str]:
    """Return all files of the project, by path and by every suffix of the path that starts at a directory."""
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    files += [path.relative_to(ROOT) for path in (ROOT / "ds_configs").glob("*.json")] + [
        Path("hatch_build.py")
    ]
    return {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))}


def test_files_that_pages_name_are_there() -> None:
    known = there() | THEIRS
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page, span in spans()
        if " DS" not in span
        for name in FILE.findall(span)
        if name.removeprefix("./") not in known and Path(name).name not in THEIRS
    ]
    assert missing == []


def test_names_of_the_design_are_in_the_code() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    defined = {
        *re.findall(r"\b(?:class|def) (\w+)", source),
        *re.findall(r"^\s*(\w+)\b[^=\n]*=", source, re.MULTILINE),
    }
    design = [DOCS / "architecture.md", *(DOCS / "design").glob("*.md")]
    missing = []
    for page, span in spans():
        if page not in design:
            continue
        names = CAMEL.findall(span) + re.findall(r"\.py: (\w+)", span)
        missing += [f"{page.name}: {name}" for name in names if name not in defined and name not in OUTSIDE]
    assert sorted(set(missing)) == []
