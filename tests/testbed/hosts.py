#!/usr/bin/env python3
"""hosts: a small cluster of pretend machines on one Linux machine, for tests.

  hosts up N [--owner PID]         make the machines head, node1 ... nodeN
  hosts down                       end them and everything that runs in them
  hosts list                       one line per machine: name, address, faults
  hosts exec NODE [--] CMD...      run a command there, as on its console
  hosts ps NODE                    what runs there besides its own init and sshd
  hosts hostfile [--slots K]       "node1 slots=K" and so on, head left out

Faults.  Each holds until `hosts heal NODE` (`hosts heal` alone: all of them).
  hosts cut NODE [PEER...]         packets to and from it vanish without a word
  hosts unplug NODE                its cable is out: its peers soon see "no route"
  hosts freeze NODE                every process is stopped; its kernel still answers
  hosts kill NODE                  every process is killed, sshd too (peers see resets)
  hosts crash NODE                 cut and kill: power loss
  hosts refuse NODE                its sshd stops listening, the rest goes on
  hosts hide NODE PATH             PATH is an empty folder (or file) there
  hosts delay NODE MS              packets take MS longer, each way
  hosts bandwidth NODE MBIT        its link carries MBIT/s, each way

Each machine has its own network, process, host name, IPC and mount namespaces,
its own sshd and host key, /run and /dev/shm, and is called eth0 10.77.0.x;
all other files are shared, as on a cluster with one network file system.  The
switch that joins them lives in a namespace of its own too, with no way out:
nothing of the surrounding machine is changed, and nothing can be reached from
inside.  `ssh node2 true` works between any two of them without a prompt.

The state is in $HOSTS_DIR (by default hosts-UID in the temporary folder); two
clusters with different folders do not disturb each other.  One process, the
keeper, holds a cluster up: when it dies, or the --owner process does, the
kernel ends every process of the cluster.

Exit codes: 0, 1 (it failed, with one line saying why), 2 (wrong usage), 77
(this machine cannot do it, with one line saying what is missing: skip the
test).  `exec` exits as its command does, or with 128 + N after signal N.  A
SIGINT sent to `exec` goes to the command's whole process group, as Ctrl-C in a
terminal does; any other signal goes to the command alone.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
DIR = Path(os.environ.get("HOSTS_DIR") or Path(tempfile.gettempdir()) / f"hosts-{os.getuid()}").absolute()
STATE = DIR / "state.json"
SUBNET = "10.77.0"
NOWHERE = "02:00:00:00:00:01"  # a hardware address that nobody has
CANNOT = 77

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = (0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000)
NAMESPACES = {"ipc": NEWIPC, "uts": NEWUTS, "net": NEWNET, "pid": NEWPID, "mnt": NEWNS}
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """Something to tell the user in one line; code is the exit code."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


# ---- system calls -------------------------------------------------------------


def syscall(name, *args):
    if getattr(libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent():
    syscall("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter(pid, *names):
    """Move this process into namespaces of process pid ('pid': its children)."""
    fds = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names}
    for name in NAMESPACES:  # mnt last: it changes what /proc is
        if name in fds:
            syscall("setns", fds[name], NAMESPACES[name])
    for fd in fds.values():
        os.close(fd)


def sh(*argv, pid=None, names=("net",), check=True):
    """Run a system program, in the namespaces of process pid if one is given."""
    done = subprocess.run(
        [str(a) for a in argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=pid and (lambda: enter(pid, *names)),
    )
    if check and done.returncode:
        raise Failed(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")
    return done.stdout


def in_child(function):
    """Call function in a forked process, which may change namespaces; did it work?"""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        os._exit(0 if function() is not False else 1)
    except BaseException as error:
        os.write(2, f"hosts: {error}\n".encode())
    os._exit(1)


def start_time(pid):
    """When a process began, in clock ticks; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


# ---- what is known about the cluster -------------------------------------------


def load():
    """The live cluster's state, or None."""
    try:
        state = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return None
    alive = start_time(state["keeper"]) == state["since"]
    return state if alive else None


def cluster():
    state = load()
    if state is None:
        raise Failed("no hosts are up (start them with: hosts up N)")
    return state


def node(state, name):
    if name not in state["nodes"]:
        raise Failed(f"no host {name!r}; there are {', '.join(state['nodes'])}", 2)
    return state["nodes"][name]


def note(state, name, fault, value):
    """Write down that a fault is on, so that list shows and heal undoes it."""
    state["nodes"][name]["faults"][fault] = value
    save(state)


def save(state):
    fresh = STATE.with_suffix(".new")
    fresh.write_text(json.dumps(state, indent=1))
    fresh.replace(STATE)


# ---- up and down ---------------------------------------------------------------


def check_machine():
    if os.getuid() != 0:
        raise Failed("needs root, to make network namespaces", CANNOT)
    for program in ("ip", "mount", "ssh", "ssh-keygen", sshd_path()):
        if not shutil.which(program):
            raise Failed(
                f"needs the program {program} (Debian: apt-get install "
                "iproute2 openssh-client openssh-server)",
                CANNOT,
            )

    def probe():
        syscall("unshare", sum(NAMESPACES.values()))
        return subprocess.run(["ip", "link", "add", "br0", "type", "bridge"]).returncode == 0

    if not in_child(probe):
        raise Failed(
            "this kernel or container does not allow new namespaces "
            "with a bridge (CAP_SYS_ADMIN and CAP_NET_ADMIN?)",
            CANNOT,
        )


def sshd_path():
    return shutil.which("sshd") or "/usr/sbin/sshd"  # sshd wants its full path


SSHD_CONFIG = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 200
MaxSessions 200
Subsystem sftp internal-sftp
"""
SSH_CONFIG = """\
Host *
    IdentityFile /etc/ssh/test_key
    IdentitiesOnly yes
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
"""


def write_files(addresses):
    """The files that each machine has for itself, under DIR/NAME and DIR/etc."""

    def keygen(path, comment):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)
        return Path(f"{path}.pub").read_text()

    etc = DIR / "etc"
    etc.mkdir()
    (etc / "hosts").write_text(
        "127.0.0.1 localhost\n::1 localhost\n"
        + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    public = keygen(DIR / "test_key", "hosts-testbed")
    known = ""
    for name, address in addresses.items():
        ssh = DIR / name / "ssh"
        ssh.mkdir(parents=True)
        known += f"{name},{address} {keygen(ssh / 'host_key', name)}"
    for name in addresses:
        ssh = DIR / name / "ssh"
        (ssh / "sshd_config").write_text(SSHD_CONFIG)
        (ssh / "ssh_config").write_text(SSH_CONFIG)
        (ssh / "authorized_keys").write_text(public)
        (ssh / "known_hosts").write_text(known)
        shutil.copy2(DIR / "test_key", ssh / "test_key")


def up(args):
    check_machine()
    if args.count < 1 or args.count > 200:
        raise Failed("N is from 1 to 200", 2)
    state = load()
    if state:
        if len(state["nodes"]) - 1 == args.count:
            return
        raise Failed(
            f"{len(state['nodes']) - 1} hosts are up in {DIR}; "
            "run `hosts down` first, or set HOSTS_DIR to another folder"
        )
    clear()
    DIR.mkdir(mode=0o700, parents=True)
    addresses = {"head": f"{SUBNET}.254"}
    addresses |= {f"node{i}": f"{SUBNET}.{i}" for i in range(1, args.count + 1)}
    STATE.write_text("{}")  # marks DIR as ours before all else
    write_files(addresses)

    hear, tell = os.pipe()
    if os.fork() == 0:
        try:
            os.close(hear)
            keep(addresses, args.owner, tell)
        except BaseException as error:
            os.write(tell, str(error).encode())
        os._exit(1)
    os.close(tell)
    answer = os.read(hear, 4096)
    if answer != b"up":
        down(args)
        raise Failed(answer.decode() or "the keeper died before the hosts were up")


def keep(addresses, owner, tell):
    """The keeper: makes the switch and the machines, then waits to be ended."""
    os.setsid()
    os.closerange(3, tell)  # not to keep a caller's pipe open
    os.closerange(tell + 1, 1024)
    watch = os.pidfd_open(owner) if owner else None
    quiet = os.open(DIR / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")
    syscall("unshare", NEWNET)
    sh("ip", "link", "add", "br0", "type", "bridge")
    sh("ip", "link", "set", "br0", "up")
    state = {"keeper": os.getpid(), "since": start_time(os.getpid()), "nodes": {}}
    for number, (name, address) in enumerate(addresses.items()):
        init = boot(name, address, f"ve{number}")
        state["nodes"][name] = {"init": init, "address": address, "port": f"ve{number}", "faults": {}}
    save(state)
    os.write(tell, b"up")
    os.close(tell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if watch is not None:
        select.select([watch], [], [])
        shutil.rmtree(DIR, ignore_errors=True)
    else:
        while True:
            signal.pause()
    os._exit(0)


def boot(name, address, port):
    """Start one machine; returns its init's process id."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    syscall("unshare", NEWPID)
    said, say = os.pipe()
    go, start = os.pipe()
    init = os.fork()
    if init == 0:
        try:
            die_with_parent()
            syscall("unshare", NEWNS | NEWUTS | NEWIPC | NEWNET)
            os.write(say, b"1")
            os.read(go, 1)
            be_init(name, address)
            os.write(say, b"2")
            os.closerange(3, 1024)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            reap_forever()
        except BaseException as error:
            os.write(say, f"{name}: {error}".encode())
        os._exit(1)
    os.close(say)
    syscall("setns", own, NEWPID)  # the next child is in the usual one
    try:
        if os.read(said, 4096) != b"1":
            raise Failed(f"{name}: no namespaces")
        sh("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", init)
        sh("ip", "link", "set", port, "master", "br0", "up")
        os.write(start, b"g")
        answer = os.read(said, 4096)
        if answer != b"2":
            raise Failed(answer.decode() or f"{name}: its init died")
    finally:
        for fd in (own, said, go, start):
            os.close(fd)
    return init


def be_init(name, address):
    socket.sethostname(name)
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "proc", "proc", "/proc")
    sh("mount", "-t", "sysfs", "-o", "ro", "sysfs", "/sys")
    sh("mount", "--bind", DIR / name / "ssh", "/etc/ssh")
    for file in ("hosts", "nsswitch.conf"):
        if os.path.exists(f"/etc/{file}"):
            sh("mount", "--bind", DIR / "etc" / file, f"/etc/{file}")
    private = ["/run", "/dev/shm", os.path.expanduser("~/.ssh")]
    for folder in private:
        if os.path.isdir(folder) and not str(DIR).startswith(folder + "/"):
            sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    os.chmod("/dev/shm", 0o1777)
    os.makedirs("/run/sshd", exist_ok=True)
    sh("ip", "link", "set", "lo", "up")
    Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text("1")
    sh("ip", "address", "add", f"{address}/24", "dev", "eth0")
    sh("ip", "link", "set", "eth0", "up")
    sh(sshd_path())


def reap_forever():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def down(args):
    """End the cluster.  Nothing to end is fine too."""
    state = load()
    if state:
        members = [n["init"] for n in state["nodes"].values()]
        os.kill(state["keeper"], signal.SIGKILL)  # the kernel then ends the machines
        deadline = time.monotonic() + 10
        while any(start_time(pid) for pid in [*members, state["keeper"]]):
            if time.monotonic() > deadline:
                raise Failed(f"processes of the cluster remain: {members}")
            time.sleep(0.01)
    clear()


def clear():
    if DIR.exists():
        if not STATE.exists() and any(DIR.iterdir()):
            raise Failed(f"{DIR} exists and is not a cluster's folder; left alone")
        shutil.rmtree(DIR)


# ---- looking and running -------------------------------------------------------


def show(args):
    for name, host in cluster()["nodes"].items():
        faults = " ".join(f"{k}={v}" for k, v in host["faults"].items())
        print(name, host["address"], faults or "-")


def hostfile(args):
    for name in cluster()["nodes"]:
        if name != "head":
            print(f"{name} slots={args.slots}")


def run_inside(host, argv, terminal=False):
    """Run argv on a machine, pass signals on to it, return its exit code."""
    passed = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    folder = os.getcwd()
    enter(host["init"], *NAMESPACES)
    os.chdir(folder if os.path.isdir(folder) else "/")
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            if not terminal:
                os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, passed | {signal.SIGCHLD})
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"hosts: {argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    while True:
        got = signal.sigwaitinfo(passed | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif not (terminal and got.si_code > 0):  # > 0: the terminal sent it to both
            whole = got.si_signo == signal.SIGINT and not terminal
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole else os.kill)(child, got.si_signo)


def started_inside(host, program):
    return run_inside(host, [program]) == 0


def execute(args):
    argv = args.cmd[1:] if args.cmd[:1] == ["--"] else args.cmd
    if not argv:
        raise Failed("exec needs a command", 2)
    return run_inside(node(cluster(), args.node), argv, terminal=sys.stdin.isatty())


def inhabitants(host):
    """(pid outside, pid inside, command) of a machine's processes, init left out."""

    def space(pid):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino

    home = space(host["init"])
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or space(entry.name) != home:
                continue
            status = (entry / "status").read_text()
            inside = int(status.split("NSpid:")[1].splitlines()[0].split()[-1])
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if inside != 1 and "\nState:\tZ" not in status:
            yield int(entry.name), inside, line or status.split()[1]


def sshd_of(host):
    """The machine's listening sshd, as a process id out here; None if it has none."""
    for pid, _, line in inhabitants(host):
        if line.startswith("sshd:") and "[listener]" in line:
            return pid


def ps(args):
    host = node(cluster(), args.node)
    listener = sshd_of(host)
    for pid, inside, line in sorted(inhabitants(host), key=lambda p: p[1]):
        if pid != listener:
            print(inside, line)


# ---- faults --------------------------------------------------------------------


def signal_all(host, signum):
    """Send a signal to every process of a machine but its init, at one stroke."""

    def send():
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signum)

    def inside():
        enter(host["init"], "pid")  # from here on for children only
        return in_child(send)

    in_child(inside)


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
    for peer in state["nodes"].values():  # an old entry would last some seconds
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
    """A relay process in the cable: not every kernel has the netem qdisc."""
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
    """Have the kernel finish each packet (size, checksum) before device sends it."""

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
    """Carry frames between two interfaces of the switch, each a while later."""
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
            with contextlib.suppress(OSError):  # full or down: lost, as on a real wire
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


def unmount(init, path):
    """umount(8) would need a /proc that shows itself."""
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


# ---- command line --------------------------------------------------------------


def parser():
    top = argparse.ArgumentParser(
        prog="hosts",
        usage="hosts VERB ... (hosts --help)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(metavar="VERB", required=True, help=argparse.SUPPRESS)

    def verb(name, function, *arguments):
        sub = verbs.add_parser(name)
        sub.set_defaults(function=function)
        for flags, options in arguments:
            sub.add_argument(*flags.split(), **options)

    where = ("node", {})
    verb("up", up, ("count", {"type": int}), ("--owner", {"type": int}))
    verb("down", down)
    verb("list", show)
    verb("exec", execute, where, ("cmd", {"nargs": argparse.REMAINDER}))
    verb("ps", ps, where)
    verb("hostfile", hostfile, ("--slots", {"type": int, "default": 1}))
    verb("cut", cut, where, ("peers", {"nargs": "*"}))
    verb("unplug", unplug, where)
    verb("freeze", freeze, where)
    verb("kill", kill, where)
    verb("crash", crash, where)
    verb("refuse", refuse, where)
    verb("hide", hide, where, ("path", {}))
    verb("delay", delay, where, ("ms", {"type": float}))
    verb("bandwidth", bandwidth, where, ("mbit", {"type": float}))
    verb("heal", heal, ("node", {"nargs": "?"}))
    return top


def main():
    args = parser().parse_args()
    try:
        if args.function not in (up, down) and os.getuid() != 0:
            raise Failed("needs root", CANNOT)
        return args.function(args) or 0
    except Failed as error:
        print(f"hosts: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
