"""Reading files: the rows, and the error of each bad file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import files_source

from dovetail.errors import DataError
from dovetail.interfaces import PluginContext
from dovetail_datasets import file_groups
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.files import FilesSource
from dovetail_datasets.prompts import check_columns, read_rows

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
    rows = placed(path)
    for row in rows:
        if isinstance(row.columns, DataError):
            raise row.columns
    return [row.columns for row in rows]


def placed(*paths: str) -> list[Any]:
    return read_rows(files_source(), paths)


def refused(path: object, *facts: str) -> None:
    """Read a file whole and streamed: each is an error with these facts."""
    for take in (read, stream):
        with pytest.raises(DataError) as error:
            take(str(path))
        for fact in facts:
            assert re.search(fact, str(error.value)), (fact, error.value)


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
"""Rows that each lack keys of another row."""


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
        groups = files_source().stream([str(path)])
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
    assert read(*paths) == ROWS
    assert [row.where for row in placed(*paths)] == [
        f"{paths[0]}, line 1",
        f"{paths[0]}, line 2",
        *(f"{paths[1]}, row {i}" for i in range(3)),
    ]


def test_lines_are_counted_with_blank_ones(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert placed(str(path))[1].where == f"{path}, line 4"


def packed(content: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(content, mtime=0)
    if ending == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return content


@pytest.fixture
def forms(write, tmp_path) -> dict[str, bytes]:
    """The same rows as files of every format."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return {
        ".jsonl": Path(write("of.jsonl", ROWS)).read_bytes(),
        ".json": json.dumps(ROWS, indent=1).encode(),
        ".parquet": Path(write("of.parquet", ROWS)).read_bytes(),
        ".arrow": sink.getvalue().to_pybytes(),
    }


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("form", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_format_is_read_also_where_it_is_compressed(
    forms, tmp_path, monkeypatch, form, ending
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"x{form}{ending}"
    path.write_bytes(packed(forms[form], ending))
    for _ in range(2):  # the second time, the unpacked file is in the cache
        rows = placed(str(path))
        assert [row.columns for row in rows] == ROWS
        assert all(row.where.startswith(f"{path}, ") for row in rows)
        assert {row.folder for row in rows} == {str(tmp_path)}
    assert len(list((tmp_path / "cache").rglob("*"))) == (2 if ending else 0)


def test_what_compressed_files_hold_is_kept_where_data_cache_dir_says(
    forms, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "other"))
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(packed(forms[".jsonl"], ".gz"))
    source = FilesSource(FilesConfig(), PluginContext(cache_dir=str(tmp_path / "own")))
    assert source.read([str(path)]) == ROWS
    (kept,) = (tmp_path / "own" / "unpacked").iterdir()
    assert kept.read_bytes() == forms[".jsonl"]
    assert not (tmp_path / "other").exists()


def changes_while_it_is_read(path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file grow after its rows have been read and before they are returned."""
    name = "islice" if form == ".jsonl" else "arrow_rows"
    real = getattr(file_groups, name)

    def replaced(*given: Any) -> Any:
        found = list(real(*given))
        path.write_bytes(path.read_bytes() + b"\n")
        return found

    monkeypatch.setattr(file_groups, name, replaced)


@pytest.mark.parametrize("form", [".jsonl", ".parquet", ".arrow"])
def test_no_row_is_given_of_a_file_that_changes_while_it_is_read(
    forms, tmp_path, monkeypatch, form
) -> None:
    path = tmp_path / f"x{form}"
    path.write_bytes(forms[form])
    groups = files_source().stream([str(path)])
    changes_while_it_is_read(path, form, monkeypatch)
    rows = groups.read(0)
    with pytest.raises(DataError, match=f"x{form} has changed"):
        next(rows)


def test_the_folder_that_datasets_writes_is_read_as_its_state_lists_it(forms, tmp_path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    names = [f"data-0000{i}-of-00002.arrow" for i in (1, 0)]
    for name in names:
        (folder / name).write_bytes(sink.getvalue().to_pybytes())
    (folder / "dataset_info.json").write_text("{}")
    (folder / "cache-1.arrow").write_bytes(b"left over")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    rows = placed(str(folder))
    assert [row.columns for row in rows] == ROWS * 2
    assert rows[0].where == f"{folder / names[0]}, row 0"
    (folder / names[1]).unlink()
    with pytest.raises(DataError, match=names[1]) as error:
        read(str(folder))
    assert error.value.hint
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json"):
        read(str(folder))


def test_a_folder_says_what_to_name_in_its_place(write, tmp_path) -> None:
    write("files/a.jsonl.gz", ROWS)
    (tmp_path / "none").mkdir()
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for name, says in (
        ("files", "files/\\*.gz"),
        ("none", "without data files"),
        ("splits", "splits/train"),
    ):
        with pytest.raises(DataError, match=says):
            read(str(tmp_path / name))


def test_a_pattern_whose_files_count_a_missing_one_is_refused(write, tmp_path) -> None:
    for number in (0, 2):
        write(f"train-{number:05}-of-00003.jsonl", ROWS)
    with pytest.raises(DataError, match=r"train-00001-of-00003\.jsonl is missing"):
        read(f"{tmp_path}/*.jsonl")
    assert len(read(str(tmp_path / "train-00002-of-00003.jsonl"))) == len(ROWS)
    write("train-00001-of-00003.jsonl", ROWS)
    assert len(read(f"{tmp_path}/*.jsonl")) == 3 * len(ROWS)


def test_patterns_are_sorted_and_recursive(write, tmp_path) -> None:
    for name in ("data/2.jsonl", "data/10.jsonl", "data/sub/1.jsonl"):
        write(name, [{"prompt": name}])
    rows = read(f"{tmp_path}/data/*.jsonl")
    assert [row["prompt"] for row in rows] == ["data/10.jsonl", "data/2.jsonl"]
    assert len(read(f"{tmp_path}/**/*.jsonl")) == 3


def test_a_file_without_a_known_ending_is_known_by_its_first_bytes(write, tmp_path) -> None:
    Path(write("train.parquet", ROWS)).rename(tmp_path / "train.data")
    assert list(read(str(tmp_path / "train.data"))) == ROWS
    with pytest.raises(DataError, match=r"'\.txt'.*\.parquet, \.pq, \.jsonl"):
        read(write("train.txt", ROWS))
    assert list(read(str(tmp_path / "train.txt"), format="jsonl")) == ROWS


def test_a_missing_file_names_the_nearest(write, tmp_path) -> None:
    write("train.parquet", ROWS)
    with pytest.raises(DataError, match="does not exist") as error:
        read(str(tmp_path / "trian.parquet"))
    assert f"did you mean {str(tmp_path / 'train.parquet')!r}?" in str(error.value)
    with pytest.raises(DataError, match=r"one of the files in .*: train\.parquet"):
        read(str(tmp_path / "zzz"))
    with pytest.raises(DataError, match=r"directory .*nowhere. does not exist"):
        read(str(tmp_path / "nowhere" / "train.parquet"))
    with pytest.raises(DataError, match=r"'.*\*.jsonl'"):
        read(f"{tmp_path}/*.jsonl")
    with pytest.raises(DataError, match=r"is a directory; .*\n.*\*.parquet"):
        read(str(tmp_path))


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.jsonl.gz", "train"])
@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
        (bz2.compress(b"x"), "bzip2", "bzip2 -d"),
        (lzma.compress(b"x"), "xz", "xz -d"),
        (b"PK\x03\x04\x14", "zip", "unzip"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16", "iconv"),
    ],
)
def test_a_file_of_another_kind_says_what_it_is_whatever_its_name(
    tmp_path, name, content, what, fix
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, name, what, fix)


NO_ROWS = pa.BufferOutputStream()
pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), NO_ROWS)


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("x.json", b'[{"prompt": "a"}, ', ""),
        ("x.json", b'[{"prompt": "a"}, 3]', ""),
        ("x.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 9999, mtime=0)[:-20], ""),
        ("x.jsonl.zst", b"\x28\xb5\x2f\xfd\x04", ""),
        ("x.arrow", b"ARROW1\x00\x00", ""),
        ("x.arrow", b"no arrow at all", ""),
        ("x.parquet", b"PAR1", "can't be read as parquet"),
        ("x.parquet", b"", r"empty \(0 bytes\)"),
        ("x.parquet", NO_ROWS.getvalue().to_pybytes(), "no rows"),
        ("x.jsonl", b"\n\n", "no rows"),
        ("x.parquet", b'{"prompt": "a"}\n', "looks like JSON: give it the ending .jsonl"),
        ("x.parquet", b"PAR1 and then nothing more of it", "ends with"),
        ("x.parquet", b"PAR1 something in between PAR1", "can't be read as parquet"),
        ("x.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON: .* column"),
        ("x.jsonl", b'{"prompt": "a"}\n"b"\n', "line 2 holds .* str, 'b'"),
        ("x.jsonl", b'{\n "prompt": "a"\n}\n', r"line 1 is not JSON.*\n.*several lines"),
        ("x.jsonl", b'{"prompt": "\xff"}\n', "line 1 is not UTF-8"),
        ("x.jsonl", b"PAR1\x00\n", "parquet file: give it the ending .parquet"),
        ("x.jsonl", b'{"prompt": "a"}\n{"n": ' + b"9" * 6000 + b"}\n", "line 2 .* digits"),
        ("x.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 1 is nested"),
    ],
)
def test_a_damaged_or_empty_file_is_named(tmp_path, name, content, fact) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, name, fact)


def test_a_streamed_file_that_goes_or_shrinks_is_named(tmp_path) -> None:
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    lines.write_text('{"prompt": "a"}\n' * 5)
    pq.write_table(pa.table({"prompt": ["a"] * 5}), table)
    groups = files_source().stream([str(lines), str(table)])
    lines.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(DataError, match=r"x.jsonl has changed"):
        list(groups.read(0))
    for number, file in enumerate((lines, table)):
        file.unlink()
        with pytest.raises(DataError) as error:
            list(groups.read(number))
        assert str(file) in error.value.message


def test_files_with_different_schemas_are_refused(write) -> None:
    one = write("one.jsonl", ROWS[:2])
    two = write("two.jsonl", [{"prompt": "2 + 2 ="}])
    with pytest.raises(DataError, match="different columns") as error:
        check_columns(placed(one, two), "prompt", [one, two])
    text = str(error.value)
    assert all(fact in text for fact in ("one.jsonl", "'data_source'", "two.jsonl", ": prompt)"))
    # Files may differ in other columns.
    extra = write("extra.jsonl", [{**ROWS[0], "images": None}])
    check_columns(placed(one, extra), "prompt", [one, extra])


def test_reading_takes_linear_time(write) -> None:
    rows = [{"prompt": f"{i}", "data_source": "d"} for i in range(20_000)]
    paths = [write(f"{i}.jsonl", rows[i::50]) for i in range(50)]
    assert len(placed(*paths)) == 20_000
