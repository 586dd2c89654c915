import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import ConfigProblems, load
from launcher.config.reader import read_text
from launcher.errors import ConfigError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), plain, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_reads_all_of_json(tree: dict, ascii_only: bool, indent: int | None) -> None:
    try:
        text = json.dumps(tree, ensure_ascii=ascii_only, indent=indent)
        text.encode()
    except UnicodeEncodeError:
        return
    assert read_text(text, "x").tree == tree


def test_comments_trailing_commas_and_places() -> None:
    text = """\ufeff// first
# second
{ /* third
     goes on */
  "a": {"b": [1, 2e3,], # fourth
    "url": "http://x#y /* no comment */",
  },
  "c": Infinity,
}
// last"""
    document = read_text(text, "f.json")
    assert document.tree == {"a": {"b": [1, 2000.0], "url": "http://x#y /* no comment */"}, "c": math.inf}
    assert document.places[("a",)] == (5, 3)
    assert document.places[("a", "b", 1)] == (5, 18)
    assert document.places[("a", "url")] == (6, 5)
    assert document.where(("a", "not written")) == "f.json:5:3"
    assert document.where(("not written",)) == "f.json"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"a": 1 "b": 2}', "f:1:8", "comma is missing"),
        ("{\n  , 1}", "f:2:3", "expected a key here"),
        ("{a: 1 b: 2}", "f:1:6", "comma is missing"),
        ("{a b: 1}", "f:1:4", 'no `:` after the key "a"'),
        ("a: 1\n}", "f:2:1", "expected a key here"),
        ("{a: '''b}", "f:1:5", "never closed by `'''`"),
        ("{a: 'b}", "f:1:5", "not closed on its line"),
        ('{"a" 1}', "f:1:6", 'no `:` after the key "a"'),
        ('{"a": [1, 2}', "f:1:12", "`]` must come before `}`"),
        ('{"a": {"b": 1', "f:1:14", "the `{` at line 1, column 7 is never closed"),
        ('{"a": "b\n"}', "f:1:7", "not closed on its line"),
        ('{"a": 1} }', "f:1:10", "unexpected text after"),
        ("[1]", "f:1:1", "must be a JSON object"),
        ("", "f:1:1", "must be a JSON object"),
        ('{"a": 1 /* b }', "f:1:9", "never closed"),
        ('{"a": "\\x"}', "f:1:8", "`\\x` is not an escape sequence"),
        ('{"a": }', "f:1:7", "expected a value here, not }"),
    ],
)
def test_syntax_errors_name_the_place(text: str, where: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, "f")
    assert caught.value.where == where
    assert what in caught.value.what
    assert caught.value.fix


def test_hjson_is_read_as_deepspeed_reads_it() -> None:
    """The package `hjson` returns the same tree."""
    text = """# no braces around it
zero_optimization: {
  stage: 2  // a number may have a comment after it
  overlap_comm: true
  'reduce_bucket_size': 5e8, "allgather_bucket_size": 2e8
  offload_optimizer: { "device": "cpu" "pin_memory": false }
}
optimizer: {
  type: AdamW
  params: { betas: [0.9
    0.95], lr: 1e-4 }
}
wandb: {
  enabled: True
  team: the red team
  group: '''
         two
           lines
         '''
  project: http://x/y
}
"""
    document = read_text(text, "f.hjson")
    assert document.tree == {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 2e8,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "lr": 1e-4}},
        "wandb": {
            "enabled": "True",
            "team": "the red team",
            "group": "two\n  lines",
            "project": "http://x/y",
        },
    }
    assert document.where(("optimizer", "params", "lr")) == "f.hjson:11:12"
    assert load(text).wandb.enabled is True


def test_a_text_without_quotes_that_takes_in_too_much_is_a_problem() -> None:
    """Hjson would read `AdamW,` and `/nvme # the fast disk`, which is never intended."""
    text = "{optimizer: {type: AdamW,\n params: {}},\n wandb: {team: a # b\n group: None\n}}"
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="f")
    assert [line for line in str(caught.value).splitlines() if "f:" in line] == [
        "  f:1:14 optimizer.type: `AdamW` is not a value",
        "  f:3:10 wandb.team: `a` is not a value",
        "  f:4:2 wandb.group: `None` is Python, not JSON",
    ]


def test_all_placeholders_of_a_template_are_told_at_once() -> None:
    text = """{"train_batch_size": GBSIZE, "fp16": {"enabled": True, "hysteresis": 01},
  "optimizer": {"type": "Adam", "params": {"betas": [0.9, NaN]}}, "zero_optimization": {"stage": ZERO_STAGE}}"""
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="f")
    assert [line for line in str(caught.value).splitlines() if "f:" in line] == [
        "  f:1:2 train_batch_size: `GBSIZE` is not a value",
        "  f:1:39 fp16.enabled: `True` is Python, not JSON",
        "  f:1:56 fp16.hysteresis: `01` is not a value",
        "  f:2:59 optimizer.params.betas[1]: `NaN` is not a value",
        "  f:2:89 zero_optimization.stage: `ZERO_STAGE` is not a value",
    ]


def test_a_key_written_twice_is_a_problem_beside_the_others() -> None:
    text = '{"fp16": {"enabled": true,\n "enabled": false},\n "gradient_cliping": 1.0}'
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="f.json")
    assert [problem.path for problem in caught.value.problems] == [("fp16", "enabled"), ("gradient_cliping",)]
    assert "f.json:2:2 fp16.enabled: the key is written twice, first at line 1" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.json"
    with pytest.raises(ConfigError, match=r"nothing\.json does not exist"):
        load(missing)
    with pytest.raises(ConfigError, match="is a directory"):
        load(str(tmp_path))
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(latin)
    with pytest.raises(ConfigError, match="a path or a dict, not a int"):
        load(3)  # type: ignore[arg-type]


def test_a_dict_is_copied() -> None:
    source = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    config = load(source)
    source["zero_optimization"]["stage"] = 3  # type: ignore[index]
    assert config.zero_optimization.stage == 1
    assert config.resolve(dp_degree=1).zero_optimization.stage == 1
    with pytest.raises(ConfigError, match="key 1 is not a string"):
        load({"fp16": {1: 2}})
