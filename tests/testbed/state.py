"""The state of the running cluster, in a file in its folder."""

import json
import os
import tempfile
from pathlib import Path

from tests.testbed.kernel import Failed, start_time

DIR = Path(os.environ.get("HOSTS_DIR") or Path(tempfile.gettempdir()) / f"hosts-{os.getuid()}").absolute()
STATE = DIR / "state.json"


def load():
    """Return the running cluster's state, or None."""
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
    """Record an active fault, for `list` and `heal`."""
    state["nodes"][name]["faults"][fault] = value
    save(state)


def save(state):
    fresh = STATE.with_suffix(".new")
    fresh.write_text(json.dumps(state, indent=1))
    fresh.replace(STATE)
