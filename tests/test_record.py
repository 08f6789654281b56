"""The journals: strict JSON, each step once, nothing lost in a buffer, and trackers that cannot hurt."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from coterie.errors import TrainError
from coterie.record import Recorder, count, flat_numbers, mean, read_rows
from coterie.types import Credit, Episode, EpisodeKey, Failure, Outcome, Reward, StopReason, Task, Turn

KEY = EpisodeKey(seed=1, purpose="train", step=4, task_id="maze:9", index=0)
TASK = Task(id="maze:9", split="train", seed=5, data={"size": 3})


def turn(candidate: int, reward: Reward | None, text: str = "R") -> Turn:
    return Turn(
        episode=KEY, act=0, candidate=candidate, role="walker", seat=0, round=0, policy="main", version=17,
        peers="train/4/maze:9/0/0", prompt_ids=(3, 14, 15), completion_ids=(9, 2), sampler_logprobs=(-0.2, -0.1),
        text=text, stop_reason=StopReason.END, temperature=1.0, played=candidate == 1, trainable=True, reward=reward,
        error=None if reward else "scorer broke",
    )  # fmt: skip


class Broken:
    name = "broken"

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


class Listening:
    name = "listening"

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.seen.append((step, dict(numbers)))

    def close(self) -> None:
        self.seen.append((-1, {}))


def test_a_missing_value_does_not_wipe_a_mean() -> None:
    """OBS-01."""
    assert mean([0.5, None, 0.7]) == 0.6
    assert count([0.5, None, 0.7]) == 2
    assert mean([None, None]) is None
    assert mean([]) is None
    assert (mean([0.0, None]), count([0.0, None])) == (0.0, 1)


def test_rows_are_one_line_each_and_read_back_equal(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.metrics(1, {"loss": 0.1, "reward/walker": None, "text": "a\nb\u2028c"})
        recorder.metrics(2, {"loss": 1 / 3})
        recorder.evals(2, {"name": "held out", "success": 0.5})
        recorder.evals(2, {"name": "swapped", "success": 0.25})
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.1, "reward/walker": None, "text": "a\nb\u2028c"},
        {"step": 2, "loss": 1 / 3},
    ]
    assert [row["name"] for row in read_rows(tmp_path / "eval.jsonl")] == ["held out", "swapped"]


def test_the_same_numbers_give_the_same_bytes_at_another_time(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with Recorder(tmp_path / name) as recorder:
            recorder.metrics(1, {"loss": 0.1 + 0.2})
        written.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert written == [b'{"step": 1, "loss": 0.30000000000000004}\n'] * 2


def test_a_number_that_json_lacks_is_null_and_named(tmp_path: Path) -> None:
    """OPT-02: a NaN gradient norm is in the log as what it was, not averaged away."""
    numbers = {"grad_norm": float("nan"), "policy": {"ratio": float("-inf")}, "loss": 0.5}
    with Recorder(tmp_path) as recorder:
        recorder.metrics(3, numbers)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == {
        "step": 3,
        "grad_norm": None,
        "policy": {"ratio": None},
        "loss": 0.5,
        "nonfinite": {"grad_norm": "nan", "policy/ratio": "-inf"},
    }


def test_a_step_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    """OBS-06: a resumed run cannot write its curves over the first one's."""
    with Recorder(tmp_path) as recorder:
        recorder.metrics(1, {})
        recorder.metrics(2, {})
        with pytest.raises(TrainError, match="goes to step 2, a row of step 2"):
            recorder.metrics(2, {})
    with Recorder(tmp_path) as recorder:
        with pytest.raises(TrainError, match="cut it back"):
            recorder.metrics(1, {})
        recorder.metrics(3, {})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_journal_cut_back_after_the_recorder_was_made_goes_on_from_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with Recorder(tmp_path) as recorder:
        recorder.event("resumed", step=1)
        os.truncate(tmp_path / "metrics.jsonl", 12)
        recorder.metrics(2, {"loss": 1})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "loss": 1}]


def test_the_clock_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """OBS-06: time is monotone over a restart."""
    recorder = Recorder(tmp_path)
    assert recorder.elapsed_s() == 0.0
    recorder.timings(1, {"time_s": 2.5, "rollout_s": 2.0})
    recorder.close()
    assert Recorder(tmp_path).elapsed_s() == 2.5
    assert [path.name for path in recorder.journals] == ["metrics.jsonl", "timings.jsonl", "eval.jsonl"]


def test_a_row_is_in_the_file_when_the_process_is_killed_right_after_it(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom coterie.record import Recorder\n"
        "r = Recorder(Path(sys.argv[1]))\nr.metrics(1, {'a': 1})\nr.event('x')\nos.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]
    assert len(read_rows(tmp_path / "events.jsonl")) == 1


def test_a_torn_last_line_is_removed_before_the_next_row(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b", "st')
    with Recorder(tmp_path) as recorder:
        assert len(read_rows(tmp_path / "events.jsonl")) == 1
        recorder.event("c", step=3)
    rows = read_rows(tmp_path / "events.jsonl")
    assert [row["event"] for row in rows] == ["a", "c"]
    assert (rows[1]["step"], set(rows[1])) == (3, {"event", "time", "step"})


def test_a_damaged_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(TrainError, match=r"metrics\.jsonl:2: not a JSON row"):
        read_rows(tmp_path / "metrics.jsonl")


def test_a_broken_tracker_is_counted_then_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    """Reliability row 27."""
    broken, listening = Broken(), Listening()
    with Recorder(tmp_path, [broken, listening]) as recorder:
        for step in range(1, 6):
            recorder.metrics(step, {"loss": float(step), "note": "x", "ok": True, "none": None})
        recorder.timings(5, {"time_s": 9.0})
        recorder.evals(5, {"name": "held out", "success": 0.5, "by_size": {"3": 1.0}})
        assert recorder.counts == {"failure": 3, "tracker_dropped": 1}
    assert broken.calls == 3
    assert listening.seen == [
        *((step, {"loss": float(step)}) for step in range(1, 6)),
        (5, {"time/time_s": 9.0}),
        (5, {"eval/held out/success": 0.5, "eval/held out/by_size/3": 1.0}),
        (-1, {}),
    ]
    events = read_rows(tmp_path / "events.jsonl")
    assert [row["event"] for row in events] == ["failure", "failure", "failure", "tracker_dropped"]
    assert (events[0]["where"], events[0]["error"]) == ("tracker broken: log", "ConnectionError")
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 5


def test_a_tracker_that_fails_now_and_then_is_kept(tmp_path: Path) -> None:
    class Moody(Listening):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            super().log(step, numbers)
            if step % 2:
                raise TimeoutError("slow")

    moody = Moody()
    with Recorder(tmp_path, [moody]) as recorder:
        for step in range(1, 10):
            recorder.metrics(step, {})
        assert recorder.counts == {"failure": 5}
    assert len(moody.seen) == 10


def test_a_tracker_that_cannot_close_is_an_event(tmp_path: Path) -> None:
    with Recorder(tmp_path, [Broken()]):
        pass
    assert [row["where"] for row in read_rows(tmp_path / "events.jsonl")] == ["tracker broken: close"]


def test_a_full_disk_ends_the_run_at_a_metrics_row_but_not_at_an_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reliability row 9: /dev/full takes nothing."""
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    recorder._last_step["metrics.jsonl"] = 0  # /dev/full reads as endless zeros
    recorder._files = {name: (tmp_path / name).open("ab", buffering=0) for name in ("metrics.jsonl", "events.jsonl")}
    with pytest.raises(TrainError, match=r"row of step 1 cannot be written.*No space left") as told:
        recorder.metrics(1, {"loss": 1.0})
    assert isinstance(told.value.__cause__, OSError)
    assert told.value.__cause__.errno == errno.ENOSPC
    recorder.event("retry", step=1)
    assert recorder.counts == {"retry": 1}
    assert "could not be written" in caplog.text
    recorder.close()


def test_episodes_hold_every_turn_with_its_credit_and_a_repeated_step_replaces_them(tmp_path: Path) -> None:
    turns = (turn(0, Reward(0.25, 0.1)), turn(1, Reward(1.0), "U\ud800"), turn(2, None))
    episode = Episode(
        key=KEY, task=TASK, turns=turns, outcome=Outcome(success=True, team=1.0, labels={"size": "3"}), failure=None
    )
    failed = Episode(
        key=KEY, task=TASK, turns=(), outcome=None, attempts=3,
        failure=Failure(where="env", kind="ValueError", message="bad map", traceback="..."),
    )  # fmt: skip
    credits = [
        Credit(turn=turns[0], value=0.35, advantage=-1.0),
        Credit(turn=turns[1], value=1.0, advantage=1.0),
        Credit(turn=turns[2], value=None, advantage=None),
    ]
    recorder = Recorder(tmp_path)
    recorder.episodes(4, [failed] * 3)
    recorder.episodes(4, [episode, failed], credits)
    rows = read_rows(tmp_path / "episodes" / "step-4.jsonl")
    assert len(rows) == 2
    assert (rows[0]["episode"], rows[0]["success"], rows[0]["labels"]) == ("train/4/maze:9/0", True, {"size": "3"})
    assert (rows[1]["attempts"], rows[1]["success"]) == (3, None)
    assert rows[1]["failure"] == {"where": "env", "error": "ValueError", "message": "bad map"}
    shown = rows[0]["turns"]
    assert isinstance(shown, list)
    assert shown[0] == {
        "act": 0, "candidate": 0, "role": "walker", "seat": 0, "round": 0, "policy": "main", "version": 17,
        "peers": "train/4/maze:9/0/0", "played": False, "trainable": True, "team": 0.25, "local": 0.1, "value": 0.35,
        "advantage": -1.0, "num_prompt_tokens": 3, "num_completion_tokens": 2, "stop_reason": "end",
        "temperature": 1.0, "error": None, "text": "R",
    }  # fmt: skip
    assert [(row["played"], row["advantage"]) for row in shown] == [(False, -1.0), (True, 1.0), (False, None)]
    assert (shown[1]["text"], shown[2]["team"], shown[2]["error"]) == ("U\ud800", None, "scorer broke")
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["step-4.jsonl"]


def test_episodes_that_cannot_be_written_are_an_event(tmp_path: Path) -> None:
    (tmp_path / "episodes").write_text("in the way")
    with Recorder(tmp_path) as recorder:
        recorder.episodes(1, [])
        assert recorder.counts == {"episodes_not_written": 1}


def test_only_numbers_go_to_trackers() -> None:
    values = {"a": 1, "b": {"c": 0.5, "d": {"e": 2}}, "f": True, "g": "3", "h": None, "i": [1, 2]}
    assert flat_numbers(values) == {"a": 1.0, "b/c": 0.5, "b/d/e": 2.0}
