"""One file a peer: each gives `build(work, flags, rank, world) -> Peer`."""
