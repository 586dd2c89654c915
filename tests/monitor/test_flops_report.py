"""The report as text: rates, utilization, tables."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.monitor.flops import Counts
from launcher.monitor.flops_report import StepFacts, report

TERA = 10**12
COUNTS = Counts(
    flops={"": 100 * TERA, "blocks.0": 60 * TERA, "blocks.1": 40 * TERA},
    seconds={"": 0.4, "blocks.0": 0.3, "blocks.1": 0.1},
    backward=300 * TERA,
    recomputed=100 * TERA,
)
PARAMETERS = {"blocks.0.weight": 10, "blocks.0.inner.bias": 10, "blocks.1.weight": 5, "scale": 15}
CLASSES = {
    "": "Model",
    "blocks": "ModuleList",
    "blocks.0": "Block",
    "blocks.0.inner": "Inner",
    "blocks.1": "Block",
}


def text(peak: float | None = 1000.0 * TERA, counted_in: int = 4, **keys: Any) -> str:
    facts = StepFacts(
        step=5,
        counted_in=counted_in,
        ranks=8,
        dp_ranks=4,
        microbatch=2,
        accumulation=2,
        phases_ms={"forward": 200.0, "backward": 700.0, "reduce": 50.0, "step": 100.0},
        device="some GPU",
        peak=peak,
    )
    return report(
        COUNTS,
        PARAMETERS,
        CLASSES,
        facts,
        **{"module_depth": -1, "top_modules": 2, "detailed": True, **keys},
    )


def lines(of: str) -> dict[str, str]:
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in of.split("\n\n")[0].splitlines())
    }


@pytest.mark.key("flops_profiler.enabled")
def test_rates_and_utilisation_of_the_whole_step() -> None:
    found = lines(text())
    assert found["forward"] == "100.00 TFLOPs, 200.00 ms, 500.00 TFLOP/s"
    assert found["backward"] == "300.00 TFLOPs, 700.00 ms, 428.57 TFLOP/s"
    assert found["step of a rank, in total"] == "400.00 TFLOPs, 1000.00 ms, 400.00 TFLOP/s"
    assert found["of which waiting for reductions"] == "50.00 ms"
    assert found["samples over all ranks"] == "16.00 /s"
    # 400 TFLOP/s run, of which 100 were done twice.
    assert found["model FLOPs utilisation (MFU)"].startswith("30.0% of 1.00 PFLOP/s")
    assert lines(text(peak=None))["model FLOPs utilisation (MFU)"] == "peak unknown"


def test_the_table_adds_up_and_containers_have_what_their_children_have() -> None:
    table = [line.split() for line in text().partition("module by module")[2].splitlines()[2:]]
    rows = {row[0]: row[2:] for row in table if row}
    assert rows["(model)"][:2] == ["40", "100.0%"] and rows["blocks"][:2] == ["25", "62.5%"]
    assert rows["0"][:5] == ["20", "50.0%", "15.00", "T", "60.0%"]
    assert rows["inner"][0] == "10" and rows["1"][0] == "5"
    assert rows["blocks"][2:5] == rows["(model)"][2:5] == ["25.00", "T", "100.0%"]


@pytest.mark.key("flops_profiler.top_modules", "flops_profiler.module_depth", "flops_profiler.detailed")
def test_depth_and_number_of_classes() -> None:
    assert "Inner" in text() and "Inner" not in text(module_depth=2)
    assert "depth 2:" in text(module_depth=2) and "depth 2:" not in text(module_depth=1)
    assert "module by module" not in text(detailed=False)
    assert "parameters: Block 25\n" in text(detailed=False, top_modules=1)


def test_counting_and_timing_in_one_step_is_said() -> None:
    assert "counting slowed it" in text(counted_in=5) and "counting slowed it" not in text()
