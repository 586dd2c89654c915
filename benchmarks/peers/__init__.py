"""One file per peer: each has a function `build(work, flags, rank, world) -> Peer`."""
