"""Reading files: what is read, and what each bad file says."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail.config.builtin import FilesConfig
from dovetail.data.files import FilesSource
from dovetail.data.rows import where
from dovetail.errors import DataError
from dovetail.interfaces import PluginContext

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(5)
]


def read(*paths: str, **config: Any) -> Any:
    return FilesSource(FilesConfig(**config), PluginContext()).read(paths)


def stream(path: str) -> list[Any]:
    groups = FilesSource(FilesConfig(), PluginContext()).stream([path])
    return [row for number in range(len(groups.sizes)) for _, row in groups.read(number)]


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.json"])
def test_rows_come_back_as_they_were_written(write, name) -> None:
    assert list(read(write(name, ROWS))) == ROWS


def call(name: str, **arguments: Any) -> dict[str, Any]:
    turn = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [turn]}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


QUESTION = {"role": "user", "content": "go"}
WEATHER = call("weather", city="Rome", near={"km": 5}, days=[{"day": 1}, {"day": 2, "hour": 3}])
COMPUTE = call("compute", expr="3*4", near={"city": "Oslo"})
NOTHING = call("now")
TOOLS = [
    tool("weather", city={"type": "string", "enum": ["Rome"]}),
    tool("compute", expr={"type": "string", "default": "1"}),
]
FILLED = {
    "calls": [{"messages": [QUESTION, each]} for each in (WEATHER, COMPUTE, NOTHING)],
    "calls of a prompt": [{"question": [QUESTION, each, QUESTION]} for each in (WEATHER, COMPUTE)],
    "calls of pairs": [{"prompt": [QUESTION], "chosen": [WEATHER], "rejected": [COMPUTE]}] * 2,
    "tools": [{"messages": [QUESTION], "tools": [each]} for each in TOOLS],
    "tools of a prompt": [{"prompt": "go", "tools": TOOLS}, {"prompt": "go", "tools": TOOLS[:1]}],
    "thoughts": [
        {"messages": [{**WEATHER, "reasoning_content": "hm"}]},
        {"messages": [{**COMPUTE, "tool_calls": COMPUTE["tool_calls"] * 2}]},
    ],
}
"""Rows of which each lacks keys that another one has."""


@pytest.mark.parametrize("rows", FILLED.values(), ids=FILLED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lists", ["list", "large_list"])
def test_keys_that_parquet_fills_in_calls_and_tools_are_not_there(
    tmp_path, rows, stream: bool, lists: str
) -> None:
    path, table = tmp_path / "x.parquet", pa.Table.from_pylist(rows)
    if lists == "large_list":
        fields = [
            pa.field(f.name, pa.large_list(f.type.value_type)) if pa.types.is_list(f.type) else f
            for f in table.schema
        ]
        table = table.cast(pa.schema(fields))
    pq.write_table(table, path)
    assert "None" in str(table.to_pylist())
    if stream:
        groups = FilesSource(FilesConfig(), PluginContext()).stream([str(path)])
        found = [row for _, row in groups.read(0)]
    else:
        found = list(read(str(path)))
    assert found == rows


def test_other_columns_of_parquet_keep_their_nulls_and_jsonl_all_of_them(write) -> None:
    rows = [
        {
            "prompt": [QUESTION],
            "reward_model": {"ground_truth": {"city": "Rome", "expr": None}},
            "extra_info": {"tools": [{"name": None, "id": 1}]},
            "choices": [{"text": None, "id": 1}],
        }
    ]
    assert list(read(write("x.parquet", rows))) == rows
    nulls = [
        {
            "messages": [QUESTION, call("weather", city=None)],
            "tools": [tool("f", a={"default": None})],
        }
    ]
    assert list(read(write("x.jsonl", nulls))) == nulls


def test_several_files_keep_their_order_and_know_every_row(write) -> None:
    paths = [write("b.jsonl", ROWS[:2]), write("a.parquet", ROWS[2:])]
    rows = read(*paths)
    assert list(rows) == ROWS
    assert rows[1:3] == ROWS[1:3]
    assert [where(rows, i) for i in (0, 1, 2, 4)] == [
        f"{paths[0]}, line 1",
        f"{paths[0]}, line 2",
        f"{paths[1]}, row 0",
        f"{paths[1]}, row 2",
    ]
    with pytest.raises(IndexError):
        rows[5]
    assert where([{}], 7) == "row 7"


def test_lines_are_counted_with_blank_ones(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert where(read(str(path)), 1) == f"{path}, line 4"


def test_patterns_are_sorted_and_recursive(write, tmp_path) -> None:
    for name in ("data/2.jsonl", "data/10.jsonl", "data/sub/1.jsonl"):
        write(name, [{"prompt": name}])
    rows = read(f"{tmp_path}/data/*.jsonl")
    assert [row["prompt"] for row in rows] == ["data/10.jsonl", "data/2.jsonl"]
    assert len(read(f"{tmp_path}/**/*.jsonl")) == 3


def test_a_file_without_a_known_ending_is_known_by_its_first_bytes(write, tmp_path) -> None:
    Path(write("train.parquet", ROWS)).rename(tmp_path / "train.data")
    assert list(read(str(tmp_path / "train.data"))) == ROWS
    with pytest.raises(DataError, match=r"ending '.txt'; files end in .parquet, .pq, .jsonl"):
        read(write("train.txt", ROWS))
    assert list(read(str(tmp_path / "train.txt"), format="jsonl")) == ROWS


def test_a_missing_file_names_the_nearest(write, tmp_path) -> None:
    write("train.parquet", ROWS)
    with pytest.raises(DataError, match="there is no file") as error:
        read(str(tmp_path / "trian.parquet"))
    assert f"did you mean {str(tmp_path / 'train.parquet')!r}?" in str(error.value)
    with pytest.raises(DataError, match=r"there are: train\.parquet"):
        read(str(tmp_path / "zzz"))
    with pytest.raises(DataError, match="there is no directory"):
        read(str(tmp_path / "nowhere" / "train.parquet"))
    with pytest.raises(DataError, match=r"no file matches '.*\*.jsonl'"):
        read(f"{tmp_path}/*.jsonl")
    with pytest.raises(DataError, match=r"is a directory\n.*\*.parquet"):
        read(str(tmp_path))


def test_empty_files_say_so(write, tmp_path) -> None:
    empty = tmp_path / "empty.parquet"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty.parquet is empty \(0 bytes\)"):
        read(str(empty))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none.parquet is empty: it has no rows"):
        read(str(tmp_path / "none.parquet"))
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"blank.jsonl is empty: it has no rows"):
        read(str(tmp_path / "blank.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n', r"begins with b'\{\"prompt\".*\n.*looks like JSON: name it .jsonl"),
        (b"PAR1 and then nothing more of it", "is not a whole parquet file: it ends with"),
        (b"PAR1 something in between PAR1", "can't be read as parquet"),
    ],
)
def test_what_is_no_parquet_file_says_what_it_is(tmp_path, content, message) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(str(path))
    assert "train.parquet" in error.value.message


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.jsonl.gz", "train"])
@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
        (gzip.compress(b"x", mtime=0), "gzip", "gzip -d"),
        (bz2.compress(b"x"), "bzip2", "bzip2 -d"),
        (lzma.compress(b"x"), "xz", "xz -d"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd", "zstd -d"),
        (b"PK\x03\x04\x14", "zip", "unzip"),
        (b"ARROW1\x00\x00", "Arrow", "Parquet"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16", "iconv"),
    ],
)
def test_a_file_of_another_kind_says_what_it_is_whatever_its_name(
    tmp_path, name, content, what, fix
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for take in (read, stream):
        with pytest.raises(DataError) as error:
            take(str(path))
        assert str(path) in error.value.message
        assert what in error.value.message
        assert fix in str(error.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"line 2 is not JSON: Expecting value at column"),
        (b'{"prompt": "a"}\n"b"\n', r"line 2 holds str 'b', not an object"),
        (b'[\n {"prompt": "a"}\n]\n', r"line 1 is not JSON.*\n.*JSON over several lines"),
        (b'{"prompt": "\xff"}\n', r"line 1 is not UTF-8"),
        (b"PAR1\x00\n", r"it is a parquet file: name it .parquet"),
        (b'{"prompt": "a"}\n{"n": ' + b"9" * 6000 + b"}\n", r"line 2 .* digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", r"line 1 is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    for take in (read, stream):
        with pytest.raises(DataError, match=message) as error:
            take(str(path))
        assert "train.jsonl, line" in error.value.message


def test_a_streamed_file_that_goes_or_shrinks_is_named(tmp_path) -> None:
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    lines.write_text('{"prompt": "a"}\n' * 5)
    pq.write_table(pa.table({"prompt": ["a"] * 5}), table)
    groups = FilesSource(FilesConfig(), PluginContext()).stream([str(lines), str(table)])
    lines.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(DataError, match=r"x.jsonl has changed.* 2 rows"):
        list(groups.read(0))
    for number, file in enumerate((lines, table)):
        file.unlink()
        with pytest.raises(DataError) as error:
            list(groups.read(number))
        assert str(file) in error.value.message


def test_a_file_that_is_too_small_for_parquet_is_named(tmp_path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1")
    for take in (read, stream):
        with pytest.raises(DataError, match=r"x.parquet can't be read as parquet"):
            take(str(path))


def test_files_with_different_schemas_are_refused(write) -> None:
    one = write("one.jsonl", ROWS[:2])
    two = write("two.jsonl", [{"prompt": "2 + 2 ="}])
    with pytest.raises(DataError, match="different schemas") as error:
        read(one, two)
    text = str(error.value)
    assert "one.jsonl has the column 'data_source'" in text
    assert "two.jsonl has not (its columns: prompt)" in text
    # further columns may differ
    extra = write("extra.jsonl", [{**ROWS[0], "images": None}])
    assert len(read(one, extra)) == 3


def test_reading_takes_linear_time(write) -> None:
    rows = [{"prompt": f"{i}", "data_source": "d"} for i in range(20_000)]
    paths = [write(f"{i}.jsonl", rows[i::50]) for i in range(50)]
    read_rows = read(*paths)
    assert len([where(read_rows, i) for i in range(len(read_rows))]) == 20_000
    assert len(list(read_rows)) == 20_000
