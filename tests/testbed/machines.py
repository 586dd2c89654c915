"""Start and stop simulated machines: namespaces, network, the files of each machine, and sshd."""

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.testbed.kernel import (
    CANNOT,
    NAMESPACES,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUTS,
    Failed,
    die_with_parent,
    in_child,
    sh,
    start_time,
    syscall,
)
from tests.testbed.state import DIR, STATE, load, save

SUBNET = "10.77.0"
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
    return shutil.which("sshd") or "/usr/sbin/sshd"  # sshd requires its full path


def write_files(addresses):
    """Write the files of each machine, under DIR/NAME and DIR/etc."""

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
    STATE.write_text("{}")  # marks DIR as ours first
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
    """Run the keeper: create the switch and the machines, then wait to be ended."""
    os.setsid()
    os.closerange(3, tell)  # do not keep a caller's pipe open
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
    """Start one machine; return the process id of its init."""
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
    syscall("setns", own, NEWPID)  # the next child is in the original one
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
    """End the cluster. Does nothing if there is none."""
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
