"""The identity of the data, which a checkpoint records and a resumed run compares."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """The settings for which a position in the data (`GlobalBatchLoader.state_dict`) is valid.

    Attributes:
        digest: checksum of the tokens of the whole data set, independent of the sequence length; None if
            unknown.
        seq_length: tokens per sequence; None if unknown.
        sequences: number of sequences.
        seed: seed of their order.
        document_mask: whether the documents in a sequence are masked from each other.
    """

    digest: str | None
    seq_length: int | None
    sequences: int
    seed: int
    document_mask: bool = False

    @classmethod
    def of(cls, dataset: Sized, seed: int) -> Identity:
        length = getattr(dataset, "seq_length", None)
        apart = getattr(dataset, "separator", None) is not None
        return cls(getattr(dataset, "digest", None), length, len(dataset), seed, apart)

    def write(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

    def is_other(self, was: Mapping[str, Any] | None) -> bool:
        """Return whether a checkpoint that recorded `was` used other data, which makes its position
        invalid."""
        before = was and was.get("digest")
        return before is not None and self.digest is not None and before != self.digest

    def changes(self, was: Mapping[str, Any] | None, place: Mapping[str, Any]) -> list[str]:
        """Return remarks, one line each, for a run that resumes at `place` of the data recorded as `was`."""
        at = f"sequence {place['samples']:,} of epoch {place['epoch']}"
        if was is None:
            return [
                f"the checkpoint does not record its training data: continuing at {at} of the current data"
            ]
        if self.is_other(was):
            return [
                f"--dataset differs from that of the checkpoint, which was at {at}: starting from its beginning"
            ]
        lines = []
        length, count, seed = was.get("seq_length"), was.get("sequences"), was.get("seed")
        if length != self.seq_length:
            lines.append(
                f"--seq-length is {self.seq_length} and was {length} in the checkpoint: continuing at {at}, "
                "which is different text now; some text is read twice in this epoch, and some not at all"
            )
        elif count != self.sequences:
            lines.append(
                f"the data set has {self.sequences:,} sequences and had {count:,} in the checkpoint: "
                f"continuing at {at}, which is a different sequence now; some are read twice in this epoch, and "
                "some not at all"
            )
        if seed != self.seed:
            lines.append(
                f"--seed is {self.seed} and was {seed} in the checkpoint: continuing at {at} in another order; some "
                "sequences are read twice in this epoch, and some not at all"
            )
        if was.get("document_mask", False) != self.document_mask:
            before, now = ("without", "with") if self.document_mask else ("with", "without")
            lines.append(
                f"the checkpoint was trained {before} --document-mask, and the run continues {now} it: its losses are "
                "not comparable with the earlier ones"
            )
        return lines
