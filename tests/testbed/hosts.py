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
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # it is run by its path

from tests.testbed import faults, slow  # noqa: E402
from tests.testbed.inside import inhabitants, run_inside, sshd_of  # noqa: E402
from tests.testbed.kernel import CANNOT, Failed  # noqa: E402
from tests.testbed.machines import down, up  # noqa: E402
from tests.testbed.state import cluster, node  # noqa: E402


def show(args):
    for name, host in cluster()["nodes"].items():
        found = " ".join(f"{k}={v}" for k, v in host["faults"].items())
        print(name, host["address"], found or "-")


def hostfile(args):
    for name in cluster()["nodes"]:
        if name != "head":
            print(f"{name} slots={args.slots}")


def execute(args):
    argv = args.cmd[1:] if args.cmd[:1] == ["--"] else args.cmd
    if not argv:
        raise Failed("exec needs a command", 2)
    return run_inside(node(cluster(), args.node), argv, terminal=sys.stdin.isatty())


def ps(args):
    host = node(cluster(), args.node)
    listener = sshd_of(host)
    for pid, inside, line in sorted(inhabitants(host), key=lambda p: p[1]):
        if pid != listener:
            print(inside, line)


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
    verb("cut", faults.cut, where, ("peers", {"nargs": "*"}))
    verb("unplug", faults.unplug, where)
    verb("freeze", faults.freeze, where)
    verb("kill", faults.kill, where)
    verb("crash", faults.crash, where)
    verb("refuse", faults.refuse, where)
    verb("hide", faults.hide, where, ("path", {}))
    verb("delay", slow.delay, where, ("ms", {"type": float}))
    verb("bandwidth", slow.bandwidth, where, ("mbit", {"type": float}))
    verb("heal", faults.heal, ("node", {"nargs": "?"}))
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
