"""Memory use of streamed examples from a file of more than a gigabyte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, GROUP = 110_000, 5_000
TAKE = """
import sys
from pathlib import Path
from dovetail.config import config_from_mapping
from dovetail_datasets.config import ShuffledConfig
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail_datasets.samplers import ShuffledSampler
from dovetail.interfaces import PluginContext
from dovetail.run.data import load_data

def peak():
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) / 1024

def take(path, count):
    data = {"train_files": path, "streaming": True, "shuffle_window": 256, "train_batch_size": 32}
    data |= {"max_prompt_length": 64, "max_response_length": 4096}
    model = {"path": sys.argv[1]}
    config = config_from_mapping({"model": model, "trainer": {"name": "supervised"}, "data": data}).config
    train, ledger = load_data(config).train, Ledger()
    sampler = ShuffledSampler(ShuffledConfig(), PluginContext(seed=1))
    loader = PromptLoader(train.prompts, sampler, 32, ledger, datasets=train.datasets, window=256)
    for step in range(count // 32):
        for example in loader.next_batch():
            ledger.take(*example.key, step=step)
            ledger.use(*example.key)
    loader.close()

take(sys.argv[2], 64)  # libraries and what the allocator keeps
before = peak()
take(sys.argv[3], 1024)
print(peak() - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_examples_of_a_gigabyte_need_a_fraction_of_it(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    paths = []
    for name, rows in (("small", GROUP), ("large", ROWS)):
        paths.append(tmp_path / f"{name}.parquet")
        _write(paths[-1], rows)
    assert paths[1].stat().st_size > 1e9
    command = [sys.executable, "-c", TAKE, str(tokenizer_directory), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout.splitlines()[-1])
    assert grown < 100, f"{grown:.0f} MiB"


def _write(path: Path, rows: int) -> None:
    """Write a file with rows of 10 kB that can't be compressed."""
    rng = np.random.default_rng(0)
    answer = "4 " * 200
    columns: dict[str, list[object]] = {}
    writer = None
    for _ in range(0, rows, GROUP):
        columns = {
            "prompt": ["2 + 2 ="] * GROUP,
            "response": [answer] * GROUP,
            "unread": [rng.bytes(9_600) for _ in range(GROUP)],
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="none")
        writer.write_table(table, row_group_size=GROUP)
    assert writer is not None
    writer.close()
