"""Faults of a simulated machine, and how to heal them."""

import os
import signal
from functools import partial

from tests.testbed.inside import signal_all, sshd_of, started_inside
from tests.testbed.kernel import Failed, enter, in_child, sh, syscall
from tests.testbed.machines import sshd_path
from tests.testbed.slow import undo_delay
from tests.testbed.state import cluster, node, note, save

NOWHERE = "02:00:00:00:00:01"  # an unused hardware address


def cut(args):
    state = cluster()
    host = node(state, args.node)
    peers = args.peers or [name for name in state["nodes"] if name != args.node]
    for name in peers:
        peer = node(state, name)
        for here, there in ((host, peer), (peer, host)):
            sh(
                "ip",
                "neigh",
                "replace",
                there["address"],
                "lladdr",
                NOWHERE,
                "dev",
                "eth0",
                "nud",
                "permanent",
                pid=here["init"],
            )
    before = host["faults"].get("cut", "").split(",") if "cut" in host["faults"] else []
    note(state, args.node, "cut", ",".join(dict.fromkeys(before + peers)))


def unplug(args):
    state = cluster()
    host = node(state, args.node)
    sh("ip", "link", "set", host["port"], "down", pid=state["keeper"])
    for peer in state["nodes"].values():  # a stale entry would last some seconds
        sh("ip", "neigh", "del", host["address"], "dev", "eth0", pid=peer["init"], check=False)
    note(state, args.node, "unplug", True)


def freeze(args):
    state = cluster()
    signal_all(node(state, args.node), signal.SIGSTOP)
    note(state, args.node, "freeze", True)


def kill(args):
    state = cluster()
    signal_all(node(state, args.node), signal.SIGKILL)
    note(state, args.node, "kill", True)


def crash(args):
    args.peers = []
    cut(args)
    kill(args)


def refuse(args):
    state = cluster()
    listener = sshd_of(node(state, args.node))
    if listener:
        os.kill(listener, signal.SIGKILL)
    note(state, args.node, "refuse", True)


def hide(args):
    state = cluster()
    host = node(state, args.node)
    path = os.path.realpath(args.path)
    inside = dict(pid=host["init"], names=("mnt",))
    if os.path.isdir(path):
        sh("mount", "-t", "tmpfs", "tmpfs", path, **inside)
    elif os.path.exists(path):
        sh("mount", "--bind", "/dev/null", path, **inside)
    else:
        raise Failed(f"{path} does not exist")
    note(state, args.node, "hide", [*host["faults"].get("hide", []), path])


def unmount(init, path):
    """Unmount a path with the system call, since umount(8) would need a /proc of its own namespace."""
    enter(init, "mnt")
    syscall("umount2", path.encode(), 2)  # MNT_DETACH


def heal(args):
    state = cluster()
    for name in [args.node] if args.node else list(state["nodes"]):
        host = node(state, name)
        faults = host["faults"]
        for peer in filter(None, faults.get("cut", "").split(",")):
            peer = node(state, peer)
            for here, there in ((host, peer), (peer, host)):
                sh("ip", "neigh", "del", there["address"], "dev", "eth0", pid=here["init"], check=False)
        if "unplug" in faults:
            sh("ip", "link", "set", host["port"], "up", pid=state["keeper"])
        if "bandwidth" in faults:
            sh("tc", "qdisc", "del", "dev", "eth0", "root", pid=host["init"], check=False)
            sh("tc", "qdisc", "del", "dev", host["port"], "root", pid=state["keeper"], check=False)
        undo_delay(state, host)
        for path in reversed(faults.get("hide", [])):
            in_child(partial(unmount, host["init"], path))
        if "freeze" in faults:
            signal_all(host, signal.SIGCONT)
        if sshd_of(host) is None and not in_child(partial(started_inside, host, sshd_path())):
            raise Failed(f"{name}: its sshd does not start")
        host["faults"] = {}
    save(state)
