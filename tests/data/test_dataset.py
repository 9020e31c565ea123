from __future__ import annotations

import copy
import json
import pickle
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import DatasetConfig, load_config
from any_agent.data import DataRow, MissingField, as_dataset, get_custom_dataset, items_of
from any_agent.errors import DatasetError
from any_agent.launcher.training_progress import format_evaluation
from any_agent.sdk.run_plan import items_of as items_of_run
from tests.support.errors import fails_with

ROWS = [{"question": f"{k} + 1?", "answer": k + 1} for k in range(5)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_file_is_read_by_its_ending(tmp_path: Path) -> None:
    for ending in ("jsonl", "ndjson", "json", "parquet"):
        path = write(tmp_path / f"tasks.{ending}")
        dataset = get_custom_dataset(path=path)
        assert list(dataset) == ROWS and len(dataset) == 5
        assert dataset.column_names == ["question", "answer"]
        assert dataset[-1] == ROWS[-1]
        assert list(get_custom_dataset(path=path, limit=2)) == ROWS[:2]
        with pytest.raises(IndexError):
            _ = dataset[5]


def test_a_dataset_of_the_config_is_loaded_as_documented(tmp_path: Path) -> None:
    config = load_config(None, [f"train_dataset.path={write(tmp_path / 'a.jsonl')}"], {})
    dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    assert list(dataset) == ROWS
    with fails_with(DatasetError, "train_dataset.path", "valid_dataset.path"):
        get_custom_dataset(split="test", dataset_config=config.valid_dataset)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"a": 1', "column 8"),
        ("{", "JSONL"),
        ('{"a": ' + "9" * 5000 + "}", "limit"),
        ("[1, 2]", "array"),
        ("7", "single value"),
        ("[" * 100_000, "deeply"),
        ("\udcff\udcfe", "UTF-8"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with fails_with(DatasetError, f"{path} line 3", says):
        get_custom_dataset(path=path)


def test_empty_lines_count_and_a_byte_order_mark_does_not(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    dataset = get_custom_dataset(path=path)
    assert list(dataset) == [{"a": 1}, {"a": 2}]
    assert dataset.where(1) == f"{path} line 3"


def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told at once: the hub is asked for nothing that is no name there."""
    datasets = pytest.importorskip("datasets")
    asked: list[str] = []

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> None:
        asked.append(path)
        raise FileNotFoundError("not on the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = ("nowhere", "nowhere.jsonl", "my/nowhere.parquet", "./nowhere", "/no/where", "~/no")
    for name in (*names, "x y"):
        with fails_with(DatasetError, "(looked from /"):
            get_custom_dataset(path=name)
    for name, says in (("tasks.parquet", "Parquet"), ("tasks.csv", ".jsonl")):
        (tmp_path / name).write_text("a,b\n")
        with fails_with(DatasetError, name, says):
            get_custom_dataset(path=tmp_path / name)
    assert asked == []
    with fails_with(DatasetError, "nobody/nothing", "not on the hub"):
        get_custom_dataset(path="nobody/nothing")


def test_the_splits_of_a_folder_are_found_by_file_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:2])
    write(tmp_path / "test-00000-of-00002.parquet", ROWS[2:4])
    write(tmp_path / "test-00001-of-00002.parquet", ROWS[4:])
    (tmp_path / "README.md").write_text("about it")
    assert list(get_custom_dataset("train", path=tmp_path)) == ROWS[:2]
    test = get_custom_dataset("test", path=tmp_path)
    assert list(test) == ROWS[2:]
    assert test.where(2).endswith("test-00001-of-00002.parquet row 1")
    with fails_with(DatasetError, "`split`", "test, train"):
        get_custom_dataset(path=tmp_path)
    with fails_with(DatasetError, "'valid'", "`split`", "test, tr"):
        get_custom_dataset("valid", path=tmp_path)


def test_a_folder_laid_out_as_on_the_hub_is_read_by_its_subset(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train-00000-of-00001.parquet")
    write(tmp_path / "data" / "train-00000-of-00001.parquet", ROWS[:1])
    assert list(get_custom_dataset(path=tmp_path, name="main")) == ROWS
    assert list(get_custom_dataset(path=tmp_path)) == ROWS[:1]
    with fails_with(DatasetError, "socratic"):
        get_custom_dataset(path=tmp_path, name="socratic")


def test_a_folder_that_datasets_has_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    read = get_custom_dataset(path=tmp_path / "one", fields=("answer",))
    assert list(read) == ROWS
    assert read.where(1) == f"{tmp_path / 'one'} row 2"
    both = datasets.DatasetDict(train=whole.select(range(3)), test=whole.select([4]))
    both.save_to_disk(tmp_path / "both")
    assert list(get_custom_dataset("test", path=tmp_path / "both")) == ROWS[4:]
    with fails_with(DatasetError, "`split`", "test, train"):
        get_custom_dataset(path=tmp_path / "both")
    for file in (tmp_path / "one").glob("*.arrow"):
        file.unlink()
    with fails_with(DatasetError, tmp_path / "one"):
        get_custom_dataset(path=tmp_path / "one")


def test_a_missing_field_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", [*ROWS, {"question": "why?"}])
    says = (f"{path} line 6", "'answer'", "question")
    with fails_with(DatasetError, *says):
        get_custom_dataset(path=path, fields=("question", "answer"))
    row = get_custom_dataset(path=path)[5]
    with fails_with(MissingField, *says):
        _ = row["answer"]
    with pytest.raises(KeyError):
        _ = row["answer"]
    assert row.get("answer") is None and "answer" not in row


def test_a_row_is_a_dictionary_wherever_it_goes() -> None:
    row = DataRow({"a": [1]}, "here")
    there = pickle.loads(pickle.dumps(row))
    assert there == row and json.dumps(there) == '{"a": [1]}' and {**row} == {"a": [1]}
    for same in (there, copy.copy(row), copy.deepcopy(row)):
        with fails_with(MissingField, "'b'"):
            _ = same["b"]


def test_an_agent_that_changes_its_row_changes_nobody_elses(tmp_path: Path) -> None:
    dataset = get_custom_dataset(path=write(tmp_path / "a.jsonl", [{"messages": [{"role": "x"}]}]))
    dataset[0]["messages"].append({"role": "y"})
    assert dataset[0]["messages"] == [{"role": "x"}]


def test_a_dataset_can_be_mapped_and_filtered_and_errors_name_the_line(tmp_path: Path) -> None:
    dataset = get_custom_dataset(path=write(tmp_path / "a.jsonl"))
    made = dataset.map(lambda row: {"messages": [{"role": "user", "content": row["question"]}]})
    assert made.column_names == ["question", "answer", "messages"]
    assert made.remove_columns(["question", "answer"])[1] == {
        "messages": [{"role": "user", "content": "1 + 1?"}]
    }
    odd = made.filter(lambda row: row["answer"] % 2 == 1)
    assert [row["answer"] for row in odd] == [1, 3, 5]
    assert odd.where(1) == f"{tmp_path / 'a.jsonl'} line 3"
    assert [row["answer"] for row in odd.select([2, 0])] == [5, 1]
    assert [row["answer"] for row in odd[1:]] == [3, 5]
    with fails_with(DatasetError, "a.jsonl line 1", "'gold'"):
        dataset.map(lambda row: {"answer": row["gold"]})
    with fails_with(DatasetError, "a.jsonl line 1", "ZeroDivisionError"):
        dataset.map(lambda row: {"answer": 1 / (row["answer"] - 1)})


class Words:
    """Tells tokens by spaces."""

    chat_template = ""

    def encode(self, text: str, **_: Any) -> list[str]:
        return text.split()


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": "a b c"}, {"question": "a b"}, {"question": "a b c d"}]
    path = write(tmp_path / "a.jsonl", rows)
    config = DatasetConfig(path=str(path), max_length=3)
    assert list(get_custom_dataset(None, config, Words())) == rows[:2]
    with fails_with(DatasetError, path, "left"):
        get_custom_dataset(None, config, Words(), max_length=1)
    with fails_with(DatasetError, "tokenizer"):
        get_custom_dataset(None, config)
    talk = write(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "a b c d"}]}])
    assert len(get_custom_dataset(path=talk, tokenizer=Words(), max_length=4)) == 1
    with fails_with(DatasetError, "c.jsonl line 1", "max_length", "messages"):
        get_custom_dataset(
            path=write(tmp_path / "c.jsonl", [{"text": "a"}]), tokenizer=Words(), max_length=4
        )


def test_any_indexed_rows_are_a_dataset_and_other_values_are_refused() -> None:
    given = as_dataset(ROWS, "train_dataset")
    assert list(given) == ROWS and given.where(3) == "train_dataset[3]"
    assert as_dataset(given, "other") is given
    with fails_with(DatasetError, "train_dataset[1]", "str"):
        _ = as_dataset([ROWS[0], "text"], "train_dataset")[1]
    for wrong in ({"a": 1}, "path.jsonl", iter(ROWS), 7):
        with fails_with(DatasetError, "train_dataset"):
            as_dataset(wrong, "train_dataset")
    with fails_with(DatasetError, "valid_dataset"):
        as_dataset([], "valid_dataset")


def test_a_table_of_pandas_or_arrow_is_read_as_its_rows() -> None:
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(ROWS, index=[7, 3, 9, 1, 0])
    for table in (frame, pyarrow.Table.from_pylist(ROWS), pandas.Series(ROWS, index=range(5, 10))):
        given = as_dataset(table, "train_dataset")
        assert list(given) == ROWS and type(given[0]["answer"]) is int
        assert items_of(table) == ROWS
        assert list(items_of_run(table)) == ROWS
    assert list(as_dataset(frame[frame.answer > 3], "train_dataset")) == ROWS[3:]
    for library, make in (("polars", "DataFrame"), ("datasets", "Dataset.from_list")):
        module = pytest.importorskip(library)
        assert list(as_dataset(attrgetter(make)(module)(ROWS), "train_dataset")) == ROWS
    with fails_with(DatasetError, "valid_dataset"):
        as_dataset(frame[:0], "valid_dataset")
    for columns in (["a", "a"], [0, 1]):
        with fails_with(DatasetError, "names"):
            as_dataset(pandas.DataFrame([[1, 2]], columns=columns), "train_dataset")


TEXT = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "datasets.md").read_text()


def test_the_documented_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in (4, 400)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = TEXT.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/how-to/datasets.md", "exec"), names)
    assert capsys.readouterr().out == "1 [{'role': 'user', 'content': '400 + 1?'}]\n"
    assert names["dataset"].column_names == ["answer", "messages"]


def test_the_documented_evaluation_prints_as_shown() -> None:
    block = TEXT.partition("A line of `metrics.jsonl`")[2].partition("```text\n")[2]
    line, _, printed = block.partition("```")[0].partition("\n\n")
    assert format_evaluation(json.loads(line.replace("...", "0"))) == printed.strip()
