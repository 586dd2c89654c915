import json
import pickle

import pytest

from launcher.config import Config, ConfigProblems, WarmupDecayLRParams, autos_of_hidden_size, load
from launcher.config.section import AUTO, Section
from launcher.config.verdicts import OF_HIDDEN_SIZE
from launcher.errors import ConfigError

HF_STYLE = """{
  "fp16": {"enabled": "auto", "loss_scale": 0},
  "bf16": {"enabled": "auto"},
  "amp": {"enabled": "auto", "opt_level": "auto"},
  "optimizer": {"type": "AdamW", "params":
    {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": "auto", "overlap_comm": "auto", "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
    "offload_optimizer": {"device": "auto"}},
  "gradient_clipping": "auto", "steps_per_print": Infinity,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"
}"""


def leaves(section: Section) -> list[object]:
    found: list[object] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        found += leaves(value) if isinstance(value, Section) else [value]
    return found


def hf_style() -> Config:
    return load(HF_STYLE).resolve(
        dp_degree=2,
        auto={
            "train_micro_batch_size_per_gpu": 4,
            "scheduler.params.total_num_steps": 5000,
            "zero_optimization.stage": 3,
            "bf16.enabled": True,
            "optimizer.params.lr": 2e-5,
            **autos_of_hidden_size(100),
        },
    )


def test_no_auto_is_left() -> None:
    assert AUTO in leaves(load(HF_STYLE))
    config = hf_style()
    assert AUTO not in leaves(config)
    assert '"auto"' not in json.dumps(config.to_dict())
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params.lr == 2e-5
    assert config.optimizer.params.betas == (0.9, 0.999)
    assert config.optimizer.params.weight_decay == 0.0
    assert isinstance(config.scheduler.params, WarmupDecayLRParams)
    assert config.scheduler.params.warmup_num_steps == 1000
    assert config.scheduler.params.warmup_max_lr == 2e-5
    assert config.dtype == "bf16"
    zero = config.zero_optimization
    assert (zero.stage, zero.overlap_comm, zero.reduce_bucket_size) == (3, True, 10_000)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (9_000, 1_000)
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None


def test_a_zero_is_an_answer() -> None:
    """transformers passes 0 for a run without warm-up; the key's default is 1000."""
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": AUTO, "warmup_min_lr": AUTO}}
    zeros = {"scheduler.params.warmup_num_steps": 0, "scheduler.params.warmup_min_lr": 0}
    config = load({"scheduler": section, "train_batch_size": 2}).resolve(dp_degree=1, auto=zeros)
    assert config.scheduler is not None
    assert (config.scheduler.params.warmup_num_steps, config.scheduler.params.warmup_min_lr) == (0, 0)


def test_what_follows_from_the_width_is_explained() -> None:
    assert set(OF_HIDDEN_SIZE) == set(autos_of_hidden_size(1))


def test_what_each_auto_became_is_told() -> None:
    told = {entry.path: (entry.value, entry.why) for entry in hf_style().resolved_autos}
    assert told["optimizer.params.lr"] == (2e-5, "given by the run")
    assert told["gradient_clipping"] == (1.0, "the key's default")
    assert told["gradient_accumulation_steps"] == (1, "the key's default")
    assert told["train_batch_size"] == (8, "from the batch equation")
    assert told["zero_optimization.offload_optimizer.device"] == ("none", "the key's default")
    assert any("amp is obsolete: removed" in str(note) for note in hf_style().notes)


@pytest.mark.parametrize(
    "path", ["zero_optimization.stage", "scheduler.params.total_num_steps", "train_micro_batch_size_per_gpu"]
)
def test_an_auto_without_an_answer_names_its_key(path: str) -> None:
    answers = {
        "train_micro_batch_size_per_gpu": 4,
        "scheduler.params.total_num_steps": 10,
        "zero_optimization.stage": 1,
    }
    del answers[path]
    with pytest.raises(ConfigProblems) as caught:
        load(HF_STYLE, where="hf.json").resolve(dp_degree=1, auto=answers)
    assert [".".join(map(str, problem.path)) for problem in caught.value.problems] == [path]
    assert "hf.json:" in str(caught.value)


def test_answers_are_checked_like_the_file() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: must be one of 0, 1, 2 or 3, not 7"):
        load({"zero_optimization": {"stage": "auto"}, "train_batch_size": 1}).resolve(
            dp_degree=1, auto={"zero_optimization.stage": 7}
        )
    with pytest.raises(ConfigError, match=r"for unknown keys: optimizer\.params\.learning_rate"):
        load({"train_batch_size": 1}).resolve(dp_degree=1, auto={"optimizer.params.learning_rate": 1})
    both = load({"train_batch_size": 1, "fp16": {"enabled": "auto"}, "bf16": {"enabled": True}})
    assert both.resolve(dp_degree=1).dtype == "bf16"
    with pytest.raises(ConfigError, match="both true"):
        both.resolve(dp_degree=1, auto={"fp16.enabled": True})


@pytest.mark.parametrize("degree", [0, -1, True, 1.5])
def test_dp_degree_is_a_count(degree: int) -> None:
    with pytest.raises(ConfigError, match="dp_degree"):
        load({"train_batch_size": 1}).resolve(dp_degree=degree)


def test_to_dict_loads_back() -> None:
    config = hf_style()
    again = load(json.loads(json.dumps(config.to_dict()))).resolve(dp_degree=2)
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert load({"train_batch_size": 4}).resolve(dp_degree=2) != config


def test_a_config_is_frozen_and_can_be_sent_to_another_process() -> None:
    config = hf_style()
    with pytest.raises(ValueError, match="frozen"):
        config.gradient_clipping = 2.0
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.resolved_autos == config.resolved_autos


def test_resolving_again_keeps_the_values() -> None:
    config = hf_style()
    assert config.resolve(dp_degree=2) == config
    with pytest.raises(ConfigError, match="must equal"):
        config.resolve(dp_degree=3)


def test_auto_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type"):
        load({"optimizer": {"type": "auto"}})
    with pytest.raises(ConfigError, match=r"zero_optimization: must be an object"):
        load({"zero_optimization": "auto"})
