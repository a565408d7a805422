"""The check for a CPU build of torch on a host with a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dovetail.interfaces import Finding
from dovetail.plugins import torch_build
from dovetail_console import host as host_module
from dovetail_console.preflight import torch_without_gpus


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A host with given GPUs, and a torch of a given build."""
    package = tmp_path / "torch"
    package.mkdir()

    def make(gpus: list[str], version_file: str) -> None:
        (package / "version.py").write_text(version_file)
        for i, name in enumerate(gpus):
            folder = tmp_path / "gpus" / f"0000:0{i}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
        monkeypatch.setattr(host_module, "_DRIVER", tmp_path / "gpus")
        monkeypatch.setenv("PATH", str(tmp_path))
        spec = type("Spec", (), {"submodule_search_locations": [str(package)]})
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return make


CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


def test_a_cpu_torch_on_a_gpu_host_is_said_with_the_command_that_mends_it(host) -> None:
    host(["NVIDIA H200", "NVIDIA H200"], CPU)
    text = host_module.cpu_torch_on_gpu_host()
    assert "2 GPUs are here (NVIDIA H200)" in text
    assert "CPU build" in text
    assert "pip install --force-reinstall torch" in text
    [found] = torch_without_gpus(None, None)
    assert isinstance(found, Finding)
    assert f"{found.message}\n  → {found.hint}" == text


@pytest.mark.parametrize(
    ("gpus", "version_file", "build"),
    [([], CPU, "cpu"), (["NVIDIA H200"], CUDA, "cuda 13.0"), ([], CUDA, "cuda 13.0")],
)
def test_other_hosts_hear_nothing(host, gpus: list[str], version_file: str, build: str) -> None:
    host(gpus, version_file)
    assert torch_build() == build
    assert host_module.gpu_names() == gpus
    assert host_module.cpu_torch_on_gpu_host() is None
    assert not [*torch_without_gpus(None, None)]


def test_nvidia_smi_tells_where_the_driver_does_not(host, tmp_path: Path) -> None:
    host([], CPU)
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho NVIDIA L4\n")
    command.chmod(0o755)
    assert host_module.gpu_names() == ["NVIDIA L4"]
    assert host_module.cpu_torch_on_gpu_host().startswith("A GPU is here (NVIDIA L4)")
