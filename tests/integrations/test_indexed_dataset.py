"""Token rows in Megatron's two files: data round-trips, and truncated files are an error."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher.errors import ConfigError
from launcher.integrations.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

ROWS = [[1, 2, 3], [4], [], [5, 6]]


def written(directory: Path, name: str = "data", dtype: type = np.int32) -> str:
    path = str(directory / name)
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    for row in ROWS[:2]:
        builder.add_item(torch.tensor(row))
    builder.end_document()
    builder.add_items([np.array(row) for row in ROWS[2:]])
    builder.end_document()
    builder.finalize(f"{path}.idx")
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint16])
def test_rows_are_what_was_written(tmp_path: Path, dtype: type) -> None:
    data = MMapIndexedDataset(written(tmp_path, dtype=dtype))
    assert [row.tolist() for row in data[:]] == ROWS and data.dtype == dtype and len(data) == 4
    assert (
        data[3].tolist() == [5, 6] and data.get(0, 1).tolist() == [2, 3] and data.get(0, 1, 1).tolist() == [2]
    )
    assert data.sizes.tolist() == [3, 1, 0, 2] and data.size(3) == 2 and data.doc_idx.tolist() == [0, 2, 4]
    assert [row.tolist() for row in pickle.loads(pickle.dumps(data))[1:3]] == ROWS[1:3]
    with pytest.raises(ValueError, match="a step other than 1"):
        data[::2]


def test_files_are_joined(tmp_path: Path) -> None:
    one, two = written(tmp_path, "one"), written(tmp_path, "two")
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "both.bin"), np.int32)
    builder.merge_file_(one)
    builder.merge_file_(two)
    builder.finalize(str(tmp_path / "both.idx"))
    data = MMapIndexedDataset(str(tmp_path / "both"))
    assert [row.tolist() for row in data[:]] == ROWS + ROWS and data.doc_idx.tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(ConfigError, match="int32, not int64"):
        MMapIndexedDatasetBuilder(str(tmp_path / "other.bin")).merge_file_(one)


@pytest.mark.parametrize(("ending", "left"), [("idx", 20), ("idx", 60), ("bin", 5), ("idx", 0)])
def test_what_is_cut_off_is_an_error(tmp_path: Path, ending: str, left: int) -> None:
    path = written(tmp_path)
    file = Path(f"{path}.{ending}")
    file.write_bytes(file.read_bytes()[:left] or b"nothing")
    assert MMapIndexedDataset.exists(path)
    with pytest.raises(ConfigError, match="not a valid dataset index"):
        MMapIndexedDataset(path)
