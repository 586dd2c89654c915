"""Every field of the policy is in the table."""

from __future__ import annotations

from dataclasses import fields

from launcher.engine.policy import FIELDS
from launcher.zero import ZeroPolicy


def test_each_field_comes_from_the_json() -> None:
    of_the_stage, of_the_model = {"shard_params", "shard_grads", "shard_optim"}, {"special_dtypes", "float8"}
    assert set(FIELDS) | of_the_stage | of_the_model == {field.name for field in fields(ZeroPolicy)}
