"""Files as rows: every format gives the same rows, and what cannot be read is named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from coterie.data import rows as reading
from coterie.data.rows import BadRow, Row, find_files, read_rows
from coterie.errors import ConfigError

TWO = [{"problem": "1+1", "answer": "2"}, {"problem": "2+2", "answer": "4"}]


def fields_of(path: Path) -> list[dict[str, object]]:
    return [dict(row.fields) for row in read_rows(path) if isinstance(row, Row)]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_json_lines_a_json_list_and_csv_give_the_same_rows_also_packed(tmp_path: Path, packed: str) -> None:
    lines = "\n".join(json.dumps(row) for row in TWO).encode()
    assert fields_of(write(tmp_path / f"a.jsonl{packed}", lines)) == TWO
    assert fields_of(write(tmp_path / f"a.json{packed}", json.dumps(TWO).encode())) == TWO
    assert fields_of(write(tmp_path / f"b.json{packed}", lines)) == TWO, "JSON lines under the name .json"
    assert fields_of(write(tmp_path / f"a.csv{packed}", b"problem,answer\n1+1,2\n2+2,4\n")) == TWO


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(TWO), tmp_path / "a.parquet")
    assert fields_of(tmp_path / "a.parquet") == TWO
    found = list(read_rows(write(tmp_path / "b.parquet", b"PAR1 nothing")))
    assert isinstance(found[0], BadRow)
    assert "not parquet" in found[0].why


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(reading.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[data\]'"):
        list(read_rows(tmp_path / "a.parquet"))


def test_places_are_lines_and_faults_are_named(tmp_path: Path) -> None:
    content = b'{"a": 1}\n\n{"a": \n\xff\xfe\n[1]\n{"a": 2}\n'
    found = list(read_rows(write(tmp_path / "a.jsonl", content)))
    path = tmp_path / "a.jsonl"
    assert [row.place for row in found] == [f"{path}:1", f"{path}:3", f"{path}:4", f"{path}:5", f"{path}:6"]
    whys = [row.why for row in found if isinstance(row, BadRow)]
    assert [why.split(":")[0] for why in whys] == [
        "not JSON",
        "not UTF-8",
        "expected an object with fields, found list",
    ]


def test_a_gzip_that_is_cut_short_gives_its_rows_and_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", b"".join(b'{"a": %d}\n' % number for number in range(5000)))
    path.write_bytes(path.read_bytes()[:-2000])
    found = list(read_rows(path))
    assert isinstance(found[0], Row)
    assert isinstance(found[-1], BadRow)
    assert "cut short" in found[-1].why


def test_a_line_that_is_far_too_long_is_a_fault_and_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_ROW_BYTES", 2**20)
    found = list(read_rows(write(tmp_path / "a.jsonl", b'{"a": "' + b"x" * 2**21 + b'"}\n')))
    assert [type(row) for row in found] == [BadRow]


def test_a_csv_row_with_another_number_of_columns_is_a_fault(tmp_path: Path) -> None:
    found = list(read_rows(write(tmp_path / "a.csv", b"a,b\n1,2\n1,2,3\n1\n")))
    assert [row.place[-2:] for row in found] == [":2", ":3", ":4"]
    assert [type(row) for row in found] == [Row, BadRow, BadRow]


def test_the_folder_layout_of_apps_is_one_source(tmp_path: Path) -> None:
    for number in ("0002", "0001"):
        (tmp_path / "train" / number).mkdir(parents=True)
        (tmp_path / "train" / number / "question.txt").write_text("Add.")
        (tmp_path / "train" / number / "input_output.json").write_text('{"inputs": ["1\\n"], "outputs": ["2\\n"]}')
    (tmp_path / "more.jsonl").write_text('{"a": 1}\n')
    assert find_files(str(tmp_path)) == [tmp_path / "more.jsonl", tmp_path / "train"]
    assert [row.place[-4:] for row in read_rows(tmp_path / "train")] == ["0001", "0002"]
    (tmp_path / "train" / "0001" / "metadata.json").write_text('{"url": "u"}')
    (tmp_path / "train" / "0002" / "metadata.json").write_text("[1]")
    first, second = read_rows(tmp_path / "train")
    assert isinstance(first, Row)
    assert (first.fields["url"], "starter_code" in first.fields) == ("u", False)
    assert isinstance(second, BadRow)
    assert "expected an object with fields, found list" in second.why


def test_what_is_no_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file, folder or data set"):
        find_files(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no file of"):
        find_files(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot tell the format"):
        list(read_rows(write(tmp_path / "a.xml", b"")))


def test_a_name_of_the_hub_is_fetched_and_its_pattern_chooses_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("main/train-0.jsonl", "main/test-0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    class Hub:
        @staticmethod
        def snapshot_download(repo: str, **how: object) -> str:
            if repo != "openai/gsm8k":
                raise FileNotFoundError(f"no data set {repo}")
            assert how["repo_type"] == "dataset"
            return str(tmp_path)

    monkeypatch.setattr(reading.importlib, "import_module", lambda name: Hub)
    assert find_files("openai/gsm8k:main/train*") == [tmp_path / "main" / "train-0.jsonl"]
    assert len(find_files("openai/gsm8k")) == 2
    with pytest.raises(ConfigError, match="fits 'other"):
        find_files("openai/gsm8k:other*")
    with pytest.raises(ConfigError, match="Hugging Face hub"):
        find_files("nobody/nothing")
