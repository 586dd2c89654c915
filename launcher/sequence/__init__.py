"""Context parallelism: the tokens of a sequence are sharded over the ranks of the cp axis.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509) exchanges heads for tokens around attention; ring attention
(Liu et al. 2023, arXiv:2310.01889) passes keys and values from rank to rank while attention to the previous
ones is computed. USP (Fang and Zhao 2024, arXiv:2405.07719) combines both: Ulysses within groups of
neighbouring ranks, a ring across groups.

All other layers work on one token at a time, so each rank computes only its own tokens."""

from launcher.sequence.apply import apply

__all__ = ["apply"]
