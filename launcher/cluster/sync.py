"""`--sync`: sends each node, over its control stream, the contents that it lacks; ranks then run the copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup
from launcher.cluster.preflight import few, refuse
from launcher.cluster.sync_manifest import SyncManifest, spoken
from launcher.cluster.wire import Message

logger = logging.getLogger("launcher")


def ship(node_group: NodeGroup, sync_manifest: SyncManifest, look_up: Callable[[], None]) -> None:
    """Create a copy on all nodes that have none (`Node.copy`); `look_up` is called while waiting.

    Raises:
        ConfigError: a node cannot store it, or a file on this machine has changed or disappeared meanwhile.
    """
    manifest = sync_manifest.manifest()
    without = [node for node in node_group.nodes if node.copy is None]
    sizes = {entry.digest: entry.size for entry in sync_manifest.entries.values()}
    sent = dict.fromkeys(without, 0)
    pieces: dict[Node, Iterator[Message]] = {}
    problems: list[tuple[str, str]] = []
    waiting = set(without)
    node_group.tell(without, "copy", manifest=manifest)
    while waiting:
        for node, message in node_group.events():
            match message["is"]:
                case "lacks":
                    sent[node] = sum(sizes[digest] for digest in message["digests"])
                    pieces[node] = sync_manifest.pieces(message["digests"])
                case "copied":
                    node.copy = message["root"]
                    waiting.discard(node)
                case "uncopied":
                    why = message["why"]
                    if message["digest"]:
                        why = f"{sync_manifest.sources[message['digest']]} changed while it was being sent"
                    problems.append((node.name, f"the files cannot be copied there: {why}"))
                    waiting.discard(node)
        for node in list(waiting):
            if node.lost is not None:
                problems.append((node.name, f"it was lost while files were being sent: {node.lost}"))
                waiting.discard(node)
            elif node in pieces:
                _send_some(node, pieces)
        look_up()
    refuse(problems, len(node_group.nodes))
    if without:
        files = "1 file" if len(sync_manifest.entries) == 1 else f"{len(sync_manifest.entries)} files"
        logger.info("sync: %s, %s; sent %s", files, spoken(sync_manifest.size), _told(sent))


def _send_some(node: Node, pieces: dict[Node, Iterator[Message]]) -> None:
    """Send pieces until the write buffer is full, or there are no more."""
    while not node.writer.full:
        piece = next(pieces[node], None)
        if piece is None:
            del pieces[node]
            node.send("build")
            return
        node.send("content", **piece)


def _told(sent: dict[Node, int]) -> str:
    """Return `1.2 MiB to node1, node2; nothing to node3`."""
    to: dict[int, list[str]] = {}
    for node, size in sent.items():
        to.setdefault(size, []).append(node.name)
    return "; ".join(f"{spoken(size) if size else 'nothing'} to {few(names)}" for size, names in to.items())
