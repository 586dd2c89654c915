"""Sends the files of a run, as they change, from the host on which `launch` was typed to a viewer elsewhere.

The viewer sends this source over ssh: nothing of this package is needed on the host. Uses only the standard
library of any Python 3.
"""

import contextlib
import glob
import json
import os
import select
import sys

EVERY_S = 1.0
TAIL = 1 << 16
"""Most bytes sent of a growing file, or of a log."""
STATUS = "logs/status.json"
FOUND = (STATUS, f"*/{STATUS}", f"runs/*/{STATUS}")
SENT = {
    STATUS: 1 << 24,
    "metrics.jsonl": TAIL,
    "schedule.json": 1 << 22,
    "config.json": 1 << 20,
    "logs/stacks.txt": 1 << 22,
}
"""File -> most bytes sent of it."""


def serve(hello):  # type: ignore[no-untyped-def]
    """Send the present files, and then their changes, until the input ends.

    Args:
        hello: the first message: `directory` to start in, and `run`, a directory; None: the newest run below.
    """
    run, orders = newest(hello), b""
    known = {}  # type: ignore[var-annotated]
    tell({"is": "run", "directory": run, "written": written(run) if run else 0})
    if run:
        send_changed(run, known)
    tell({"is": "sent"})
    while True:
        if run:
            send_changed(run, known)
        if not select.select([0], [], [], EVERY_S)[0]:
            continue
        text = os.read(0, 1 << 16)
        if not text:
            return
        *lines, orders = (orders + text).split(b"\n")
        for line in lines:
            run = obey(json.loads(line), run)


def newest(hello):  # type: ignore[no-untyped-def]
    """Return the absolute directory of the run; None if there is none."""
    with contextlib.suppress(OSError):  # `run` may be an absolute path
        os.chdir(hello["directory"])
    under = [os.path.join(glob.escape(hello["run"]), STATUS)] if hello["run"] else FOUND
    found = [path for pattern in under for path in glob.glob(pattern)]
    return (
        os.path.dirname(os.path.dirname(os.path.abspath(max(found, key=os.path.getmtime)))) if found else None
    )


def written(run):  # type: ignore[no-untyped-def]
    return os.path.getmtime(os.path.join(run, STATUS))


def send_changed(run, known):  # type: ignore[no-untyped-def]
    for name, most in SENT.items():
        path = os.path.join(run, name)
        try:
            stat = os.stat(path)
            if known.get(name) != (stat.st_mtime_ns, stat.st_size):
                tell({"is": "file", "name": name, "text": tail(path, most)})
                known[name] = stat.st_mtime_ns, stat.st_size
        except OSError:
            continue


def obey(order, run):  # type: ignore[no-untyped-def]
    """Execute an order, and return the directory of the run."""
    run = order.get("run", run)
    if "log" in order and run:
        for path in sorted(
            glob.glob(os.path.join(glob.escape(run), "logs", "*rank{}.log".format(int(order["log"]))))
        )[:1]:
            tell({"is": "log", "rank": order["log"], "text": tail(path, TAIL)})
    if order.get("stacks") and run:
        # fails for another user's run, whose stacks are not ours to request
        with contextlib.suppress(OSError), open(os.path.join(run, "logs", "stacks.asked"), "a"):
            pass
    return run


def tail(path, most):  # type: ignore[no-untyped-def]
    """Return the end of a file; if the file is longer, without its first, incomplete line."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        data = file.read(most)
    return (data if size <= most else data.partition(b"\n")[2]).decode("utf-8", "replace")


def tell(message):  # type: ignore[no-untyped-def]
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if "hello" in globals():  # set by the one-line program that executes this text
    serve(globals()["hello"])
