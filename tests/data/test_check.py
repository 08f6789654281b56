"""What a check of data finds: repeats, clashes, and training problems that are evaluation problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.data.check import Spread, check_sources

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LONG = "Alice has seven apples and gives two of them to Bob who then eats one of the two in the garden"


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("\n".join(json.dumps({"problem": problem, "answer": answer}) for problem, answer in rows))
    return str(path)


def test_repeats_within_and_across_files_are_found_and_a_clash_is_a_fault(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [("What is 1+1?", "2"), ("what is $1 + 1$", "2"), ("What is 2+2?", "4")])
    two = write(tmp_path / "b.jsonl", [("What is 2+2?", "5")])
    report = check_sources([one, two])
    assert [(pair.place[-1], pair.earlier[-1], pair.clash) for pair in report.duplicates] == [
        ("2", "1", False),
        ("1", "3", True),
    ]
    assert report.num_faults == 1
    assert report.sources[0].chars == Spread(12, 12, 15)


def test_overlap_with_an_evaluation_set_is_found_in_equal_and_in_almost_equal_words(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", [(LONG + ".", "4"), (LONG + " and house.", "4"), ("Other", "1")])
    held = write(tmp_path / "e.jsonl", [(LONG.upper(), "4")])
    report = check_sources([train], [held])
    assert [(pair.place[-1], pair.near) for pair in report.overlap] == [("1", False), ("2", True)]
    assert report.num_faults == 2
    other = write(tmp_path / "o.jsonl", [(LONG.replace("seven", "nine"), "6")])
    assert check_sources([other], [held]).num_faults == 0, "almost the same words, another answer: another problem"


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the project")
def test_the_nine_problems_of_aime_2024_in_the_past_aimes_are_found() -> None:
    report = check_sources([str(DATA / "aime_past")], [str(DATA / "aime24")])
    assert len(report.overlap) == 9
    assert [pair.clash for pair in report.overlap] == [False] * 9


def test_the_command_counts_and_exits_with_1_where_something_is_wrong(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", [("What is 1+1?", "2"), ("What is 2+2?", "4")])
    runner = CliRunner()
    fine = runner.invoke(app, ["data", "check", good])
    assert fine.exit_code == 0, fine.output
    assert "no faults" in fine.output
    bad = write(tmp_path / "b.jsonl", [("What is 1+1?", "2"), ("What?", "")])
    found = runner.invoke(app, ["data", "check", bad, "--against", good])
    assert found.exit_code == 1
    assert "b.jsonl:2: field 'answer' is empty" in found.output
    assert "1 problems are in an evaluation set too" in found.output
    assert "2 faults" in found.output
