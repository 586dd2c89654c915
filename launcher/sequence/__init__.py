"""Long sequences: the tokens of a sequence shared by the ranks of the cp axis (context parallelism).

Ulysses (Jacobs et al. 2023, arXiv:2309.14509) exchanges heads for tokens around attention; ring attention (Liu et al.
2023, arXiv:2310.01889) sends keys and values from rank to rank while attention to those before is computed. USP (Fang
and Zhao 2024, arXiv:2405.07719) is both: Ulysses inside groups of neighbours, a ring across the groups.

Everything else of a model works on one token at a time, so each rank computes its own tokens only."""

from launcher.sequence.apply import apply

__all__ = ["apply"]
