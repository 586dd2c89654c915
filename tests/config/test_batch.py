import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import Config, load
from launcher.config.ranks import BatchError, BatchTriple, solve
from launcher.errors import ConfigError

small = st.integers(1, 12)
TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@given(small, small, small, st.sets(st.sampled_from([TRAIN, MICRO, ACCUMULATION]), min_size=1))
def test_any_two_give_the_third(micro: int, accumulation: int, ranks: int, kept: set[str]) -> None:
    truth = {TRAIN: micro * accumulation * ranks, MICRO: micro, ACCUMULATION: accumulation}
    given_keys = {key: truth[key] for key in kept}
    if kept == {ACCUMULATION}:
        with pytest.raises(BatchError):
            solve(given_keys, ranks)
        return
    found = solve(given_keys, ranks)
    assert found.train == found.micro * found.accumulation * ranks
    for key, value in zip((TRAIN, MICRO, ACCUMULATION), found, strict=True):
        assert value == truth[key] or key not in kept
    if len(kept) > 1:
        assert found == tuple(truth.values())
    else:
        assert found.accumulation == 1


@given(st.integers(1, 60), st.none() | small, st.none() | small, small)
def test_either_solved_or_mended_by_what_the_error_says(
    train: int, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    given_keys = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    try:
        found = solve(given_keys, ranks)
    except BatchError as error:
        for way in (error.problem.fix or "").split("; or "):
            mended, mended_ranks = dict(given_keys), ranks
            if way.startswith("run on"):
                mended_ranks = int(way.split()[2])
            else:
                mended[way.split()[0]] = int(way.split()[1])
            solve(mended, mended_ranks)
        return
    assert found.train == train == found.micro * found.accumulation * ranks
    assert found.micro == micro or micro is None
    assert found.accumulation == accumulation or accumulation is None


def test_the_error_shows_the_equation_its_sources_and_the_ways_out() -> None:
    text = """{"train_batch_size": 32,
 "train_micro_batch_size_per_gpu": 4,
 "gradient_accumulation_steps": "auto"}"""
    with pytest.raises(ConfigError) as caught:
        load(text, where="b.json").resolve(dp_degree=2, auto={ACCUMULATION: 3})
    message = str(caught.value)
    assert (
        "train_batch_size 32 (b.json:1:2) must equal train_micro_batch_size_per_gpu 4 (b.json:2:2) x "
        "gradient_accumulation_steps 3 (given by the run) x data-parallel ranks 2 = 24"
    ) in message
    assert "train_batch_size 24; or gradient_accumulation_steps 4" in message


def test_indivisible_batch_names_the_nearest_sizes() -> None:
    with pytest.raises(BatchError) as caught:
        solve({TRAIN: 31, MICRO: 4}, 2)
    assert caught.value.problem.fix == "train_batch_size 32 or 24"


def test_nothing_given_is_an_error() -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        load({}).resolve(dp_degree=1)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 4 alone"):
        load({"gradient_accumulation_steps": 4}).resolve(dp_degree=1)


def triple(config: Config) -> BatchTriple:
    batch = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    return BatchTriple(*batch)  # type: ignore[arg-type]


def test_autos_are_found_from_the_equation() -> None:
    config = load({TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"})
    solved = config.resolve(dp_degree=4, auto={MICRO: 2, ACCUMULATION: 3})
    assert triple(solved) == (24, 2, 3)
    assert {entry.path: entry.why for entry in solved.resolved_autos} == {
        TRAIN: "from the batch equation",
        MICRO: "given by the run",
        ACCUMULATION: "given by the run",
    }
    assert triple(config.resolve(dp_degree=4, auto={MICRO: 2})) == (8, 2, 1)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        config.resolve(dp_degree=4)


def test_a_run_may_not_override_what_is_written() -> None:
    solved = load({MICRO: 2}).resolve(dp_degree=1, auto={MICRO: 7})
    assert triple(solved) == (2, 2, 1)
