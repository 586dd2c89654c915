"""Counters and aggregation in the recipes' loop."""

from __future__ import annotations

import torch

from launcher.data.sft import IGNORED
from launcher.engine.token_weights import learned_tokens
from launcher.train import collate


def test_the_first_label_of_a_row_predicts_nothing() -> None:
    learned_at_the_end = torch.tensor([[IGNORED, IGNORED, 5, 6], [7, IGNORED, IGNORED, 8]])
    assert learned_tokens({"labels": learned_at_the_end}) == 3
    learned_at_the_start = torch.tensor([[5, 6, IGNORED, IGNORED]])
    assert learned_tokens({"labels": learned_at_the_start}) == 1


def test_rows_of_tokens_learn_themselves() -> None:
    batch = collate([torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2], [3, 4]]
    rows = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([IGNORED, 2])}]
    assert collate(rows)["labels"].tolist() == [[IGNORED, 2]]
