"""Which failure is the first one, and its message."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.cluster.failure import (
    ErrorRecord,
    Failure,
    append_to_logs,
    describe,
    exit_code,
    first_failure,
    read_record,
    with_tail,
)

PIDS = {0: 100, 1: 101, 2: 102}


def record(time: float, kind: str = "exception", message: str = "ValueError: x") -> ErrorRecord:
    return ErrorRecord(kind, message, f"Traceback:\n{message}", time)


def test_earliest_record_is_first_even_if_that_rank_is_still_leaving() -> None:
    found = first_failure({0: 1}, {0: record(10.2), 1: record(10.1)}, PIDS, seen_at=10.3)
    assert (found.rank, found.pid, found.exit_code) == (1, 101, None)
    assert exit_code(found) == 1


def test_killed_rank_comes_before_errors_that_followed_it() -> None:
    found = first_failure({0: 1, 2: -9}, {0: record(10.2)}, PIDS, seen_at=10.1)
    assert (found.rank, found.record, exit_code(found)) == (2, None, 137)


def test_error_before_the_death_of_another_rank_comes_first() -> None:
    found = first_failure({0: -6, 1: 1}, {1: record(9.0)}, PIDS, seen_at=10.0)
    assert (found.rank, exit_code(found)) == (1, 1)


def test_what_the_rank_recorded_is_its_exit_code() -> None:
    assert exit_code(Failure(1, 101, -14, record(1))) == 1  # its end hung after the error
    assert exit_code(Failure(1, 101, None, record(1, "mendable"))) == 2
    assert exit_code(Failure(1, 101, 7, record(1, "exit"))) == 7


def test_message_shows_the_end_of_the_log_unless_it_was_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    failure = with_tail(Failure(1, 101, -15, None), log)
    text = describe(failure, log_was_shown=False)
    assert "rank 1 (pid 101) was killed by SIGTERM" in text
    assert "line 49" in text and "line 30" in text and "line 29" not in text
    assert "line 49" not in describe(failure, log_was_shown=True)


def test_mendable_error_is_its_own_message(tmp_path: Path) -> None:
    failure = Failure(0, 100, 2, record(1, "mendable", "no such model"), log=str(tmp_path / "rank0.log"))
    text = describe(failure, log_was_shown=True)
    assert text.startswith("no such model\n") and "Traceback" not in text and "rank 0" in text


def test_record_of_torch_elastic_and_torn_file_are_read(tmp_path: Path) -> None:
    torch_layout = {"message": {"message": "E: y", "extraInfo": {"py_callstack": "stack", "timestamp": "12"}}}
    (tmp_path / "a").write_text(json.dumps(torch_layout))
    assert read_record(str(tmp_path / "a")) == ErrorRecord("exception", "E: y", "stack", 12.0)
    (tmp_path / "b").write_text('{"message": {"mess')
    assert read_record(str(tmp_path / "b")) is None
    assert read_record(str(tmp_path / "absent")) is None


def test_errors_end_the_logs(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"rank{rank}.log" for rank in (0, 1)}
    for log in logs.values():
        log.write_text("before\n")
    append_to_logs({0: record(1, "mendable", "typo"), 1: record(1)}, logs)
    assert logs[0].read_text() == "before\nerror: typo\n"
    assert logs[1].read_text() == "before\nTraceback:\nValueError: x"


def test_a_failure_travels_as_json() -> None:
    failure = Failure(
        3,
        101,
        1,
        record(1, "mendable", "é\udc80"),
        12.5,
        1,
        "/runs/rank3.log",
        ("a", "b"),
        left_before=(0, 2),
    )
    assert Failure.from_json(json.loads(json.dumps(failure.to_json()))) == failure


def test_on_several_hosts_the_message_says_where(tmp_path: Path) -> None:
    failure = Failure(
        3, 101, -9, None, local_rank=1, log="/runs/x/rank3.log", memory_killer="the log reports it"
    )
    text = describe(failure, log_was_shown=False, place="stage 1", host="node2")
    assert (
        "rank 3 (stage 1, node2, local rank 1, pid 101) was killed by the kernel for lack of memory" in text
    )
    assert "its log: node2:/runs/x/rank3.log" in text and "dmesg" not in text


def test_a_rank_that_waited_for_one_that_had_ended_says_so() -> None:
    lost = record(1, message="RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5033")
    text = describe(Failure(0, 100, 1, lost, left_before=(1,)), log_was_shown=True)
    assert "rank 1 ended earlier, without an error" in text and "fix: on every rank, call" in text
    assert "ranks 1, 2 ended earlier" in describe(
        Failure(0, 100, 1, lost, left_before=(1, 2)), log_was_shown=True
    )
    assert "had ended" not in describe(Failure(0, 100, 1, lost), log_was_shown=True)
    assert "had ended" not in describe(Failure(0, 100, 1, record(1), left_before=(1,)), log_was_shown=True)
