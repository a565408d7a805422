"""What a plugin's distribution ships: a manifest that agrees with the classes, inside the wheel too."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from dovetail.errors import PluginError
from dovetail.plugins.distributions import Installed
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.manifest import COMMAND, FILE_NAME, normalised, package_directories
from dovetail_sdk.manifest import describe
from dovetail_sdk.manifest_differences import differences
from dovetail_sdk.project import Declared, Project

_BUILD_TIME = 120.0
"""Seconds that building a wheel may take."""


class NotHereError(PluginError):
    """This environment lacks something that a check needs; the message names what is missing."""


def installed(entry: PluginEntry) -> Installed:
    """Return the installed distribution to which a plugin belongs."""
    return next(
        one
        for one in default_index().distributions
        if normalised(one.name) == normalised(entry.distribution)
    )


def check_manifest(entry: PluginEntry) -> None:
    """Check that a plugin's installed manifest matches its class, except for fields that come only from pyproject.toml.

    Raises:
        PluginError: the manifest and the class differ; the message lists every difference.
    """
    package = entry.target.split(":")[0].split(".")[0]
    home = package_directories(package)[0]
    declared = {
        (e.kind, e.name): Declared(kind=e.kind, name=e.name, target=e.target)
        for e in default_index().entries()
        if e.distribution == entry.distribution
        and e.kind in default_index().kinds
        and e.entry_point is not None
    }
    project = Project(
        directory=home,
        distribution=entry.distribution,
        plugins=tuple(declared.values()),
        package=package,
        package_directory=home,
        needs=(),
    )
    key = (entry.kind, entry.name)
    derived = describe(declared[key], project, default_index().kind(entry.kind))
    del derived["needs"]
    path = home / FILE_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    ours = [item for item in data["plugins"] if (item.get("kind"), item.get("name")) == key]
    found = differences({**data, "plugins": ours}, {**data, "plugins": [derived]})
    if found:
        raise PluginError(
            f"the manifest {path} differs from the plugin class {entry.target}: "
            + "; ".join(found),
            hint=f"write the manifest again: in the source folder of {entry.distribution}, run {COMMAND}",
        )


def check_wheel(entry: PluginEntry) -> None:
    """Check that a plugin's wheel contains the manifest. For an editable install, a wheel is built from the source folder.

    Raises:
        NotHereError: no wheel can be built in this environment.
        PluginError: the wheel has no manifest, or its manifest differs from the package's.
    """
    package = entry.target.split(":")[0].split(".")[0]
    wanted = f"{package}/{FILE_NAME}"
    metadata = installed(entry).metadata
    source = editable_source(metadata)
    if source is None:
        names = {str(path) for path in metadata.files or ()}
        if wanted not in names:
            raise PluginError(
                f"the installed wheel of {entry.distribution} lacks the manifest {wanted}",
                hint="configure the build backend to include the manifest, which lies beside the package's __init__.py",
            )
        return
    shipped = built_file(source, wanted)
    if shipped is None:
        raise PluginError(
            f"the wheel built from {source} lacks the manifest {wanted}",
            hint="configure the build backend to include the manifest; hatchling includes every file below "
            "`packages` of [tool.hatch.build.targets.wheel] unless .gitignore names it",
        )
    here = (package_directories(package)[0] / FILE_NAME).read_bytes()
    if shipped != here:
        raise PluginError(
            f"the manifest in the wheel built from {source} differs from the manifest in the package {package}",
            hint=f"write the manifest again: in the source folder, run {COMMAND}",
        )


@functools.cache
def built_file(source: Path, wanted: str) -> bytes | None:
    """Return a file's content from a source folder's wheel (built once per process), or None if the wheel lacks the file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(build_wheel(source, Path(folder))) as archive,
    ):
        return archive.read(wanted) if wanted in archive.namelist() else None


def editable_source(metadata: Distribution) -> Path | None:
    """Return the source folder of an editable install, or None for a distribution installed from a wheel."""
    text = metadata.read_text("direct_url.json")
    try:
        origin = json.loads(text) if text else {}
    except ValueError:
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel from a source folder, without isolation and without the network.

    Raises:
        NotHereError: the build backend is not installed or fails.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir"]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [*command, str(folder), str(source)],
            capture_output=True,
            text=True,
            timeout=_BUILD_TIME,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHereError(
            f"building a wheel from {source} took longer than {_BUILD_TIME:g} s",
            hint="build the wheel by hand to see why",
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotHereError(
            f"a wheel can't be built from {source} in this environment: {last}",
            hint="install the package's build backend, for example: pip install hatchling",
        )
    return wheels[0]
