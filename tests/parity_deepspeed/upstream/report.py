"""The table of tests that pass with DeepSpeed, that are excluded here, and how many of the rest pass here."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.parity_deepspeed.upstream.areas import area_of, why_left_out, works_here

Outcomes = dict[str, dict[str, str]]


def show(results: Path, reference: Path) -> int:
    """Print the table; return how many tests pass with DeepSpeed, are not excluded, and fail here."""
    theirs, ours = _read(reference), _read(results / "ours.json")
    passed = {test for test, found in theirs.items() if found["outcome"] == "passed"}
    left_out = {test for test in passed if why_left_out(test)}
    asked = passed - left_out
    here = {test for test in asked if ours.get(test, {}).get("outcome") == "passed"}
    print("| directory | DeepSpeed passes | left out | asked | passed here |\n|---|---:|---:|---:|---:|")
    counts = [_by_area(tests) for tests in (passed, left_out, asked, here)]
    for area in sorted(counts[0]):
        print(f"| {area} | {' | '.join(str(count[area]) for count in counts)} |")
    print(f"| all | {' | '.join(str(len(tests)) for tests in (passed, left_out, asked, here))} |")
    if asked:
        print(f"\n{len(here)} of {len(asked)}: {100 * len(here) / len(asked):.1f} %")
        refusals = {test for test in asked - here if works_here(test)}
        rest = len(asked) - len(refusals)
        print(f"{len(here)} of {rest}: {100 * len(here) / rest:.1f} %, without refusals of what works here")
    tried = {test for test in left_out if test in ours}
    if tried:
        passing = {test for test in tried if ours[test]["outcome"] == "passed"}
        print(f"{len(passing)} of {len(tried)} that are left out pass here all the same")
    _failures(asked - here, ours)
    return min(len(asked - here), 100)


def _failures(tests: set[str], ours: Outcomes) -> None:
    causes: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        found = ours.get(test, {"outcome": "not run", "text": ""})
        first = found["text"].strip().partition("\n")[0]
        causes[f"{found['outcome']}: {first[:300]}"].append(test)
    for cause, of in sorted(causes.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(of)} x {cause}")
        for test in of:
            print(f"    {test}")


def _by_area(tests: set[str]) -> Counter[str]:
    return Counter(area_of(test) for test in tests)


def _read(path: Path) -> Outcomes:
    found: Outcomes = json.loads(path.read_text()) if path.exists() else {}
    return found
