"""One dead rank ends the run, and no process of a run outlives it."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cluster import rank as first_code
from tests.cluster.launching import alive, environment, launch, launching, pids_in, wait_for, wait_until_gone

# Every rank leaves its process id, and has a child in a session of its own that ignores SIGTERM.
WAITING = """
import os, pathlib, subprocess, sys, time
rank = os.environ["RANK"]
child = subprocess.Popen(
    [sys.executable, "-c",
     "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"],
    start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
for pid in (os.getpid(), child.pid):
    pathlib.Path(f"{pid}.pid").touch()
print(f"rank {rank} waits", flush=True)
temporary = pathlib.Path(f"ready{rank}.tmp")
temporary.write_text(str(os.getpid()))
temporary.rename(f"ready{rank}")
time.sleep(99)
"""


def write(directory: Path, text: str, name: str = "script.py") -> str:
    (directory / name).write_text(text)
    return name


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_run_and_is_named(tmp_path: Path, victim: int) -> None:
    script = write(tmp_path, WAITING)
    with launching("--num_gpus", "2", script, "--output-dir", "out", cwd=tmp_path) as process:
        pids = [int(wait_for(tmp_path / f"ready{rank}")) for rank in (0, 1)]
        started = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - started
        assert alive(pids_in(tmp_path)) == []
    assert len(pids_in(tmp_path)) == 4
    assert process.returncode == 137
    assert took < 10
    assert f"rank {victim} (pid {pids[victim]}) was killed by SIGKILL" in errors
    assert "dmesg" in errors
    assert str(tmp_path / "out" / "logs") in errors
    # Rank 0's output is on the terminal already; another rank's last lines are shown.
    assert (f"rank {victim} waits" in errors) == (victim == 1)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_signal_to_the_launcher_ends_all(tmp_path: Path, number: signal.Signals, times: int) -> None:
    script = write(tmp_path, WAITING)
    with launching("--num_gpus", "2", script, cwd=tmp_path) as process:
        for rank in (0, 1):
            wait_for(tmp_path / f"ready{rank}")
        since = time.monotonic()  # before the signal: this process may not run for a while after it
        for _ in range(times):
            time.sleep(0.3)
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - since
        assert alive(pids_in(tmp_path)) == []
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in errors
    # What ignores SIGTERM has 3 s; the second signal leaves it none.
    assert (times == 2) == ("killed by the second signal" in errors)
    assert took > 2.5 or times == 2


SAVING = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    time.sleep(0.5)
    pathlib.Path(f"saved{rank}").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready{rank}").write_text("yes")
time.sleep(99)
"""


def test_ranks_have_time_to_save_when_the_launcher_is_terminated(tmp_path: Path) -> None:
    script = write(tmp_path, SAVING)
    with launching("--num_gpus", "2", "--term_grace", "60", script, cwd=tmp_path) as process:
        for rank in (0, 1):
            wait_for(tmp_path / f"ready{rank}")
        process.terminate()
        _, errors = process.communicate(timeout=50)  # less than the ranks have
    assert process.returncode == 143 and "stopped by SIGTERM" in errors
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script = write(tmp_path, WAITING)
    with launching("--num_gpus", "2", script, cwd=tmp_path) as process:
        pids = [int(wait_for(tmp_path / f"ready{rank}")) for rank in (0, 1)]
        process.kill()
        process.wait()
        assert wait_until_gone(pids, limit_s=5) == []


def test_exception_is_shown_once_without_our_frames(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')\ntime.sleep(99)\n",
    )
    done = launch("--num_gpus", "2", script, "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "ValueError: bad batch" in done.stderr
    assert "script.py" in done.stderr and "runpy" not in done.stderr and "rank.py" not in done.stderr
    assert "ValueError: bad batch" in (tmp_path / "out/logs/rank1.log").read_text()


def test_the_first_error_is_reported_not_the_first_exit(tmp_path: Path) -> None:
    # Rank 1 fails first but is slow to leave; rank 0 fails because of it and leaves at once.
    script = write(
        tmp_path,
        "import atexit, os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('failed', 'w').close()\n"
        "    atexit.register(time.sleep, 1.5)\n    raise ValueError('the cause')\n"
        "while not os.path.exists('failed'):\n    time.sleep(0.01)\n"
        "time.sleep(0.6)\nraise ConnectionError('the consequence')\n",
    )
    done = launch("--num_gpus", "2", script, cwd=tmp_path)
    assert "the cause" in done.stderr and "the consequence" not in done.stdout + done.stderr


def test_an_error_says_which_rank_had_ended_before(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.symlink(f'/proc/{os.getpid()}', 'other')\n    raise SystemExit\n"
        "while not os.path.lexists('other') or os.path.exists('other'):\n    time.sleep(0.01)\n"
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:5033')\n",
    )
    done = launch("--num_gpus", "2", script, cwd=tmp_path)
    assert "rank 1 ended earlier, without an error" in done.stderr


def test_rank_that_hangs_after_its_error_ends_the_run(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=time.sleep, args=(99,)).start()\n    raise ValueError('stuck')\n"
        "time.sleep(99)\n",
    )
    started = time.monotonic()
    done = launch("--num_gpus", "2", script, cwd=tmp_path)
    assert time.monotonic() - started < 20
    assert "ValueError: stuck" in done.stderr and done.returncode == 1


@pytest.mark.parametrize(
    ("last", "code"), [("raise ValueError('x')", 1), ("sys.exit(7)", 7), ("sys.exit(0)", 0)]
)
def test_failed_rank_calls_exit_handlers_and_is_not_taken_apart(tmp_path: Path, last: str, code: int) -> None:
    script = write(
        tmp_path,
        "import atexit, os, sys\n"
        "class Late:\n    def __del__(self, write=os.write): write(1, b'apart')\n"
        f"sys.late = Late()\natexit.register(print, 'handler')\n{last}\n",
    )
    command = [sys.executable, first_code.__file__, "script", script]
    env = {**environment(), "LAUNCHER_PID": str(os.getpid())}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert "handler" in done.stdout and ("apart" in done.stdout) == (code == 0)


def test_mistake_found_by_all_ranks_is_printed_once_without_traceback(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "from launcher.errors import ConfigError\n"
        "raise ConfigError('no such model', where='--model', fix='name another')\n",
    )
    done = launch("--num_gpus", "3", script, "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("no such model") == 1
    assert "fix: name another" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    # The rank that said it; others may have been stopped before they came so far.
    assert any("no such model" in log.read_text() for log in (tmp_path / "out/logs").glob("rank*.log"))


def test_exit_code_of_the_script_is_passed_on(tmp_path: Path) -> None:
    script = write(
        tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(99)\n"
    )
    done = launch("--num_gpus", "2", script, cwd=tmp_path)
    assert done.returncode == 7
    assert "rank 1" in done.stderr and "exit code 7" in done.stderr


def test_crash_in_native_code_is_named(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import ctypes, os, time\nif os.environ['RANK'] == '1': ctypes.string_at(0)\ntime.sleep(99)\n",
    )
    done = launch("--num_gpus", "2", script, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 1" in done.stderr and "SIGSEGV" in done.stderr
    assert 'script.py", line 2' in done.stderr  # faulthandler's stack, from the log


def test_what_a_rank_is_told(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import json, os, sys\n"
        "json.dump([sys.argv, sys.path[0], dict(os.environ)], open('told' + os.environ['RANK'], 'w'))\n"
        "print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)\n",
    )
    flags = "--num_gpus", "2", "--device", "cpu"
    done = launch(*flags, script, "--x", "1", "--output_dir=out", cwd=tmp_path, threads=None)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1)]
    for rank, (argv, path, env) in enumerate(told):
        assert argv == [str(tmp_path / script), f"--local_rank={rank}", "--x", "1", "--output_dir=out"]
        assert path == str(tmp_path)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["LAUNCHER_DEVICE"] == "cpu"
        assert env["LAUNCHER_OUTPUT_DIR"] == str(tmp_path / "out")
        cores = len(os.sched_getaffinity(0))
        assert env["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert (tmp_path / f"out/logs/rank{rank}.log").read_text() == f"out {rank}\nerr {rank}\n"
    assert told[0][2]["MASTER_PORT"] == told[1][2]["MASTER_PORT"] != "0"
    # Rank 0 is copied to the terminal, rank 1 is not; no error files are left by a run that went well.
    assert "out 0\nerr 0\n" in done.stdout and "out 1" not in done.stdout + done.stderr
    assert "2 ranks on cpu, backend gloo, OMP_NUM_THREADS=" in done.stdout
    assert sorted(p.name for p in (tmp_path / "out/logs").iterdir()) == [
        "rank0.log",
        "rank1.log",
        "status.json",
    ]


def test_module_program_and_own_logs(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print('module', __name__, sys.argv[1:])\n", "my_module.py")
    done = launch("--module", "--no_local_rank", "my_module", "--flag", cwd=tmp_path)
    assert "module __main__ ['--flag']" in done.stdout, done.stderr
    done = launch("--no_python", "--no_local_rank", "echo", "plain", cwd=tmp_path)
    assert "plain\n" in done.stdout and done.returncode == 0, done.stderr
    done = launch("--enable_each_rank_log", "each", "-q", "--module", "my_module", cwd=tmp_path)
    assert done.stdout == "" and done.returncode == 0
    (log,) = (tmp_path / "each").glob("*_rank0.log")
    assert "module __main__" in log.read_text()


def test_bound_cores_are_disjoint(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    script = write(
        tmp_path,
        "import json, os\nrank, threads = os.environ['RANK'], os.environ['OMP_NUM_THREADS']\n"
        "json.dump([sorted(os.sched_getaffinity(0)), threads], open('cores' + rank, 'w'))\n",
    )
    done = launch("--bind_cores_to_rank", "--num_gpus", "2", script, cwd=tmp_path)
    half = len(cores) // 2
    if half == 0:
        assert "cannot be divided" in done.stderr
        return
    (first, threads), (second, _) = (json.loads((tmp_path / f"cores{rank}").read_text()) for rank in (0, 1))
    # Sides of a machine need not be equal: see test_cores.py.
    assert len(first) == len(second) == int(threads) and half - half // 4 <= len(first) <= half
    assert not {*first} & {*second} and {*first, *second} <= {*cores}


def test_taken_port_is_an_error_before_any_rank_starts(tmp_path: Path) -> None:
    script = write(tmp_path, "open('started', 'w')\n")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = launch("--master_port", str(port), script, cwd=tmp_path)
    assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr
    assert not (tmp_path / "started").exists()


def test_rank_0_sees_a_terminal_when_the_user_has_one(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, sys\nprint('terminal', sys.stdout.isatty(), os.environ['RANK'])\n"
        "for step in range(3): print(f'\\r\\x1b[2Kstep {step}', end='', flush=True)\nprint()\n",
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "launcher.cli.main", "--num_gpus", "2", script, "--output-dir", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 4096):
            shown += data
    except OSError:  # the terminal has no writer any more
        pass
    assert process.wait(timeout=30) == 0
    os.close(master)
    assert b"terminal True 0\r\n" in shown and b"\x1b[2Kstep 1" in shown
    assert (tmp_path / "out/logs/rank0.log").read_text() == "terminal True 0\nstep 2\n"
    assert (tmp_path / "out/logs/rank1.log").read_text().startswith("terminal False 1\n")


def test_a_stopped_launcher_does_not_end_the_run(tmp_path: Path) -> None:
    script = write(
        tmp_path, "import time\nopen('started', 'w').write('x')\ntime.sleep(4)\nopen('done', 'w')\n"
    )
    with launching("--node_timeout", "1", script, cwd=tmp_path) as process:
        wait_for(tmp_path / "started")
        process.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and (tmp_path / "done").exists(), errors
