"""Ending a process tree, whatever dies in it meanwhile."""

from __future__ import annotations

import subprocess
import sys

# What the guard of an agent does, in a process of its own: it ends everything below it.
SWEEP = """
import os, signal, subprocess, sys, time
from launcher.cluster import processes

RANK = '''
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
'''

def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False

processes.adopt_orphans()
left = []
for turn in range(TURNS):
    command = [sys.executable, "-S", "-c", RANK]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    below = [int(rank.stdout.readline()) for rank in ranks]
    if os.fork() == 0:  # as the kernel does when the agent of these ranks is killed, a moment earlier or later
        time.sleep(0.0005 * turn)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        os._exit(0)
    processes.end_descendants(0)
    left += [pid for pid in below if lives(pid)]
    for pid in filter(lives, below):
        os.kill(pid, signal.SIGKILL)
print("left:", left)
"""


def test_ranks_that_die_during_the_look_hide_nobody() -> None:
    script = SWEEP.replace("TURNS", "12")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "left: []", done.stdout + done.stderr
