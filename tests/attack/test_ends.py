"""A run starts on the port that was picked for it, and a successful run exits with 0."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from launcher.cluster.probe import ProbeServer
from tests.cluster.launching import launch

HERE = "127.0.0.1"
LATE = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if sys.argv[1] == "collectives":  # gloo's threads work on them while the script ends
    for _ in range(200):
        dist.all_reduce(torch.ones(200_000), async_op=True)
elif sys.argv[1] == "threads":
    matrix = torch.ones(200, 200)
    def work():
        while True:
            matrix @ matrix
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
kept = open(f"kept{os.environ['RANK']}", "w")
kept.write("not closed")
class Last:
    def __del__(self):
        print("said last")
last = Last()
dist.barrier()
"""


@pytest.mark.parametrize("busy", [pytest.param("collectives", marks=pytest.mark.full), "threads"])
def test_threads_that_are_still_in_torch_do_not_abort_a_good_run(tmp_path: Path, busy: str) -> None:
    (tmp_path / "late.py").write_text(LATE)
    flags = ("--num_gpus", "2", "--device", "cpu", "--no_local_rank", "--tee", "all")
    done = launch(*flags, "late.py", busy, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate" not in done.stdout + done.stderr and "Traceback" not in done.stdout
    assert done.stdout.count("said last") == 2
    assert [(tmp_path / f"kept{rank}").read_text() for rank in (0, 1)] == ["not closed"] * 2


def test_a_picked_port_is_given_to_nobody_else_and_torch_can_take_it() -> None:
    port = ProbeServer()
    picked = port.open(HERE, 0, "word")["port"]
    port.leave()
    low, high = map(int, re.findall(r"\d+", Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Not as a free port: all others of the range are tried before a second time comes.
        if low <= picked <= high:
            with pytest.raises(OSError, match="in use"):
                socket.socket().bind((HERE, picked))
        with socket.create_server((HERE, 0)) as server, pytest.raises(OSError):
            socket.create_connection(server.getsockname(), source_address=(HERE, picked))
    store = dist.TCPStore(HERE, picked, 1, is_master=True, wait_for_workers=False)
    assert store.port == picked
    del store
    port.close()
    with socket.socket() as other:
        other.bind((HERE, picked))


def test_a_port_that_is_taken_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import launcher\nlauncher.init_distributed()\n")
    with socket.create_server((HERE, 0)) as server:
        server.listen()
        port = server.getsockname()[1]
        (tmp_path / "script.py").write_text(
            f"import os\nos.environ['MASTER_PORT'] = '{port}'\nfrom launcher.comm import init_distributed\n"
            "init_distributed()\n"
        )
        done = launch("--num_gpus", "2", "--device", "cpu", "script.py", cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "is in use by another program" in said and "Traceback" not in said
