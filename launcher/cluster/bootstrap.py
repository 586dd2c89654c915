"""The first code of an agent on its node, which the front end sends as text.

Nothing of this package needs to be installed on the node to run it, so that a missing package, directory or
variable is reported as such. Uses only the standard library of any Python 3.
"""

import json
import os
import sys


def arrive(hello):  # type: ignore[no-untyped-def]
    """Apply the environment, directory and import path of the front end, then become the agent.

    Args:
        hello: the front end's first message.
    """
    if sys.path and sys.path[0] == "":
        del sys.path[0]
    for name in list(os.environ):
        if name.startswith(tuple(hello["forget"])):
            del os.environ[name]
    os.environ.update(hello["environment"])
    missing = [name for name in hello["own"] if name not in os.environ]
    if missing:
        names = ", ".join(missing)
        problem(
            hello,
            f"{names} is not set there, and secrets are not sent over an unencrypted connection",
            f"set {names} on that node, or connect to it by ssh",
        )
    if list(sys.version_info[:2]) != hello["python"]:
        version, wanted = [".".join(map(str, v)) for v in (sys.version_info[:3], hello["python"])]
        problem(
            hello,
            f"{sys.executable} is Python {version}, here it is {wanted}",
            "install the same version there",
        )
    try:
        os.chdir(hello["directory"] or ".")
    except OSError as error:
        what = f"no directory {hello['directory']}: {error.strerror}"
        problem(hello, what, "start in a directory that exists on all hosts")
    sys.path[:0] = [path for path in hello["path"] if os.path.isdir(path)]
    try:
        from launcher.cluster.agent import serve
    except ImportError as error:
        problem(hello, f"its Python cannot import {error.name or error}", "install the same packages there")
    serve(hello)


def problem(hello, what, fix):  # type: ignore[no-untyped-def]
    text = json.dumps({"is": "problem", "what": what, "fix": fix}).encode()
    session = hello.get("session")
    os.write(1, b"\x1e" + (session.sends.closed(text) if session else text) + b"\n")
    sys.exit(3)


if "hello" in globals():  # set by the one-line program that executes this text
    arrive(globals()["hello"])
