import json
import re
from pathlib import Path

import pytest

from launcher.config import Config, load

DIRECTORY = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(DIRECTORY.glob("*.json"))
PIPELINES = {"pp2": 0, "pp2_zero3": 3, "3d": 1}
"""Those with two pipeline stages -> their stage of ZeRO."""
SHARED = {"cp2_ulysses_ring": 3}
"""Those in which four ranks share a sequence -> their stage of ZeRO."""
STAGES = PIPELINES | SHARED | {"moe_ep2": 1}


def test_the_files() -> None:
    names = {"zero0", "zero1", "zero2", "zero3", "bf16_zero2", "bf16_zero3", "fp16_zero1", "tp2_zero1"}
    names |= {"zero2_offload", "zero3_offload", "zero3_nvme"}
    assert {path.stem for path in FILES} >= names | set(STAGES)


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("hf_*.json")), ids=lambda path: path.stem)
def test_what_accelerate_reads_itself_has_no_comments(path: Path) -> None:
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_is_what_its_name_says_on_any_number_of_ranks(path: Path) -> None:
    for ranks in (1, 2, 3, 4, 7):
        by_trainer = {"train_micro_batch_size_per_gpu": 4} if path.stem.startswith("hf_") else {}
        config = load(path).resolve(dp_degree=ranks, auto=by_trainer)
        assert config.train_batch_size == 4 * ranks
        assert config.expert_parallel.degree == (2 if path.stem == "moe_ep2" else 1)
        zero = STAGES[path.stem] if path.stem in STAGES else int(re.findall(r"zero(\d)", path.stem)[0])
        assert config.zero_optimization.stage == zero
        assert config.pipeline.degree == (2 if path.stem in PIPELINES else 1)
        assert config.cp_degree == (4 if path.stem in SHARED else 1)
        first = path.stem.partition("_")[0]
        assert config.dtype == (first if first in ("bf16", "fp16") else "fp32")
        assert config.tensor_parallel.degree == (2 if first in ("tp2", "3d") else 1)
        place = path.stem.rpartition("_")[2]
        for section in (config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param):
            if section is not None:
                assert section.device == {"offload": "cpu", "nvme": "nvme"}[place]
        assert config.notes == ()


def test_the_stages_differ_in_nothing_else() -> None:
    def rest(config: Config) -> dict[str, object]:
        tree = config.to_dict()
        tree["zero_optimization"].pop("stage")
        return tree

    trees = [rest(load(DIRECTORY / f"zero{stage}.json")) for stage in range(4)]
    assert all(tree == trees[0] for tree in trees)
