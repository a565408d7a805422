"""Compose configs with Hydra, in an environment that has it: reads jobs as JSON, writes what they come to as JSON."""

import json
import sys

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf


def main() -> None:
    """Read a JSON list of jobs from standard input, and write a JSON list with each job's composed config or its error.

    A job has `folder`, `searchpath`, `name` and `overrides`; its result has `values` or `error`.
    """
    found = []
    for job in json.load(sys.stdin):
        GlobalHydra.instance().clear()
        overrides = list(job["overrides"])
        if job["searchpath"]:
            overrides.append(f"hydra.searchpath=[file://{job['searchpath']}]")
        try:
            with initialize_config_dir(config_dir=job["folder"], version_base=None):
                config = compose(config_name=job["name"], overrides=overrides)
            found.append({"values": OmegaConf.to_container(config, resolve=True)})
        except Exception as error:  # noqa: BLE001 - one job's error is its result
            found.append({"error": f"{type(error).__name__}: {error}"[:500]})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
