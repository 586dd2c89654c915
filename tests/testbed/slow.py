"""Slow links: limited bandwidth, and a relay process that adds delay, since not every kernel has the netem qdisc."""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import time

from tests.testbed.kernel import Failed, enter, in_child, sh, start_time
from tests.testbed.state import DIR, cluster, node, note


def bandwidth(args):
    state = cluster()
    host = node(state, args.node)
    for device, pid in (("eth0", host["init"]), (host["port"], state["keeper"])):
        sh(
            "tc",
            "qdisc",
            "replace",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            f"{args.mbit}mbit",
            "burst",
            "64kb",
            "latency",
            "200ms",
            pid=pid,
        )
    note(state, args.node, "bandwidth", args.mbit)


def delay(args):
    """Start a relay process on the link, since not every kernel has the netem qdisc."""
    state = cluster()
    host = node(state, args.node)
    undo_delay(state, host)
    port, keeper = host["port"], state["keeper"]
    a, b = port.replace("ve", "va"), port.replace("ve", "vb")
    sh("ip", "link", "add", a, "type", "veth", "peer", "name", b, pid=keeper)
    sh("ip", "link", "set", a, "master", "br0", "up", pid=keeper)
    sh("ip", "link", "set", b, "up", pid=keeper)
    whole_packets("eth0", host["init"])
    whole_packets(a, keeper)
    sh("ip", "link", "set", port, "nomaster", pid=keeper)
    hear, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(hear)
        quiet = os.open(DIR / "log", os.O_RDWR | os.O_APPEND)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        try:
            relay(port, b, args.ms / 1000, keeper, tell)
        finally:
            os._exit(1)
    os.close(tell)
    pid = int(os.read(hear, 64) or 0)
    if not pid:
        raise Failed(f"the relay did not start; see {DIR / 'log'}")
    host["relay"] = [pid, start_time(pid)]
    note(state, args.node, "delay", args.ms)


def whole_packets(device, pid):
    """Make the kernel complete each packet (size, checksum) before device sends it."""

    def off():
        enter(pid, "net")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for what in (0x17, 0x1F, 0x25):  # ETHTOOL_STXCSUM, STSO, SGSO
                value = ctypes.create_string_buffer(struct.pack("II", what, 0))
                fcntl.ioctl(
                    s,
                    0x8946,
                    struct.pack(  # SIOCETHTOOL
                        "16sP16x", device.encode(), ctypes.addressof(value)
                    ),
                )

    if not in_child(off):
        raise Failed(f"cannot set the offloads of {device}")


def relay(left, right, seconds, keeper, tell):
    """Forward frames between two interfaces of the switch, with a delay."""
    over = os.pidfd_open(keeper)
    enter(keeper, "net")
    links = []
    for name in (left, right):
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        link.bind((name, 3))
        link.setsockopt(263, 23, 1)  # SOL_PACKET, PACKET_IGNORE_OUTGOING
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        link.setblocking(False)
        links.append(link)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    pending = []  # (due, link, frame), in order of due
    while True:
        wait = max(0, pending[0][0] - time.monotonic()) if pending else None
        ready = select.select([over, *links], [], [], wait)[0]
        if over in ready:
            os._exit(0)
        now = time.monotonic()
        for link in ready:
            other = links[1 - links.index(link)]
            try:
                for _ in range(256):
                    pending.append((now + seconds, other, link.recv(65536)))
            except BlockingIOError:
                pass
        sent = 0
        for due, link, frame in pending:
            if due > now:
                break
            with contextlib.suppress(OSError):  # full or down: dropped, as on a real link
                link.send(frame)
            sent += 1
        del pending[:sent]


def undo_delay(state, host):
    pid, since = host.pop("relay", (0, 0))
    if pid and start_time(pid) == since:
        os.kill(pid, signal.SIGKILL)
    if "delay" in host["faults"]:
        sh("ip", "link", "del", host["port"].replace("ve", "va"), pid=state["keeper"], check=False)
        sh("ip", "link", "set", host["port"], "master", "br0", pid=state["keeper"])
