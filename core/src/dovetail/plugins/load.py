"""Loading: from a config section to the plugin's class, its Config, and an instance."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import (
    ConfigError,
    PluginBrokenError,
    PluginError,
    PluginNeedsError,
)
from dovetail.interfaces.plugin import Plugin, PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.plugins.contract import (
    check_class,
    check_config,
    config_of,
    import_object,
    public_module,
    with_article,
)
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.files import (
    file_and_attribute,
    load_file_class,
    resolve,
)
from dovetail.plugins.index import default_index
from dovetail.plugins.manifest import COMMAND
from dovetail.plugins.needs import require
from dovetail.sections import PluginSection
from dovetail.sections.fields import PLUGIN_KIND


def ref_for(kind: str, section: PluginSection) -> PluginRef:
    """Return a reference to the plugin that a config section selects. Imports no plugin.

    Raises:
        PluginError: no usable plugin has the name, or the file does not exist.
        ConfigError: the section selects no plugin, or two plugins.
    """
    default_index().kind(kind)
    if section.path is not None:
        path, attribute = file_and_attribute(kind, section.path, section.attribute, section.name)
        place = str(resolve(path))
        return PluginRef(kind=kind, name=attribute, path=place, attribute=attribute, config=section)
    if section.name is None:
        raise _nothing_selected(kind)
    entry = default_index().find(kind, section.name)
    return PluginRef(kind=kind, name=entry.name, distribution=entry.distribution, config=section)


def load_plugin_class(ref: PluginRef) -> type[Plugin]:
    """Import the plugin class that a reference names, and check the class against its interface and manifest.

    Raises:
        PluginNotFoundError, PluginConflictError, PluginIncompatibleError: no usable plugin has the name.
        PluginNeedsError: the import fails because a package that the plugin needs is missing.
        PluginBrokenError: the import fails, or the class contradicts its interface or manifest.
    """
    kind = default_index().kind(ref.kind)
    if ref.path is not None:
        path, attribute = file_and_attribute(ref.kind, ref.path, ref.attribute)
        return load_file_class(kind, path, attribute)
    return load_entry(find(ref))


def find(ref: PluginRef) -> PluginEntry:
    """Return the installed plugin that a reference names.

    Raises:
        PluginError: no usable plugin has the name.
    """
    exact = ref.name if ref.distribution is None else f"{ref.name}@{ref.distribution}"
    return default_index().find(ref.kind, exact)


def load_entry(entry: PluginEntry) -> type[Plugin]:
    """Import the plugin of an index entry, and check its class. For errors see `load_plugin_class`."""
    kind = default_index().kind(entry.kind)
    cls = check_class(_import(entry), kind, f"{entry.target} of {entry.title}")
    if entry.manifest is None:
        raise PluginBrokenError(
            f"the plugin {entry.title} has no manifest", hint=f"write one: {COMMAND}"
        )
    for attribute, declared in (("name", entry.name), ("api", entry.manifest.api)):
        actual = getattr(cls, attribute, None)
        if actual != declared:
            source = "its entry point" if attribute == "name" else "its manifest"
            raise PluginBrokenError(
                f"{entry.target} of {entry.title} has {attribute} = {actual!r}, "
                f"but {source} says {declared!r}",
                hint=f"make the two agree, then run: {COMMAND}",
            )
    return cls


def make_plugin(ref: PluginRef, context: PluginContext, *, needs: bool = True) -> Plugin:
    """Construct the plugin that a reference names, on the host where the plugin runs.

    Args:
        ref: the plugin's reference.
        context: role, rank, model and settings of the plugin's process.
        needs: whether to check that the packages that the plugin needs are installed. False if the plugin is not run, but only asked for
            its columns or examined by a preflight rule.

    Raises:
        PluginNeedsError: a package that the plugin needs is missing. Not raised for a plugin that connects to a running engine.
        PluginError: the plugin can't be loaded, or its config is of another class.
    """
    # An engine that runs already has its packages in its own environment.
    if needs and ref.path is None and not getattr(ref.config, "joined", 0):
        entry = find(ref)
        require(
            f"{entry.kind} {entry.name!r}",
            entry.distribution,
            entry.manifest.needs if entry.manifest else (),
        )
    cls = load_plugin_class(ref)
    return cls(_config_for(ref, cls), context)


def config_class(kind: str, section: Mapping[str, Any]) -> type[PluginSection]:
    """Return the Config class of the plugin that a raw section selects; only the plugin's config module is imported.

    Raises:
        PluginError: no usable plugin has the name, or its config module fails.
        ConfigError: the section selects no plugin, or two plugins.
    """
    known = default_index().kind(kind)
    name, path = section.get("name"), section.get("path")
    if path is not None:
        file = file_and_attribute(kind, path, section.get("attribute"), name)
        return config_of(load_file_class(known, *file), known)
    if name is None:
        raise _nothing_selected(kind)
    if not isinstance(name, str):
        raise ConfigError(f"`name` of a {kind} section must be text, not {name!r}")
    entry = default_index().find(kind, name)
    target = entry.manifest.config if entry.manifest else ""
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise PluginBrokenError(
            f"the config {target} of {entry.title} can't be imported: {cause_of(error)}",
            hint=f"report it to the author of {entry.distribution}, who must correct the module and run: {COMMAND}",
        ) from error
    return check_config(found, known, f"the config {target} of {entry.title}")


def plugin_section(kind: str, name: str, **settings: Any) -> Any:
    """Return a config section that selects an installed plugin: an instance of the plugin's Config.

    Args:
        kind: the kind of the plugin.
        name: the name of the plugin.
        settings: fields of the Config; a field that selects a plugin accepts the plugin's name.

    Raises:
        PluginError: no usable plugin has the name, or its config module fails.
    """
    config = config_class(kind, {"name": name})
    fields = attrs.fields_dict(config)
    for key, value in settings.items():
        if isinstance(value, str) and key in fields and fields[key].metadata.get(PLUGIN_KIND):
            settings[key] = plugin_section(fields[key].metadata[PLUGIN_KIND], value)
    return config(name=name, **settings)


def _config_for(ref: PluginRef, cls: type[Plugin]) -> Any:
    """Return a reference's config as an instance of the plugin's own Config.

    If the reference has a config of the kind's base class, only its values that differ from the defaults are kept; all others become
    the defaults of the plugin's Config.
    """
    wanted = config_of(cls, default_index().kind(ref.kind))
    if isinstance(ref.config, wanted):
        return ref.config
    if ref.config is None:
        return wanted(name=None if ref.path else ref.name, path=ref.path, attribute=ref.attribute)
    base = import_object(default_index().kind(ref.kind).section)
    if type(ref.config) in (PluginSection, base):
        plain, fields = type(ref.config)(), attrs.fields(type(ref.config))
        given = {field.name: getattr(ref.config, field.name) for field in fields}
        return wanted(**{k: value for k, value in given.items() if value != getattr(plain, k)})
    raise PluginError(
        f"{ref.kind} {ref.name!r} was given a config of the wrong class, {type(ref.config).__name__}",
        hint=f"give an instance of {public_module(wanted)}.{wanted.__name__}",
    )


def _import(entry: PluginEntry) -> object:
    """Import the class of an entry point; an error of the import names the unmet needs or the file and line."""
    from dovetail.plugins.driver import load_entry_point

    if entry.entry_point is None:
        raise PluginBrokenError(f"the plugin {entry.title} has no entry point", hint=entry.fix)
    try:
        return load_entry_point(entry.entry_point)
    except (Exception, SystemExit) as error:
        unmet = [need for need in entry.needs if not need.met]
        if isinstance(error, ImportError) and unmet:
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            raise PluginNeedsError(
                f"{entry.title} needs {wanted}", hint=entry.install_command
            ) from error
        raise PluginBrokenError(
            f"the plugin {entry.title} can't be imported from {entry.target}: {cause_of(error)}",
            hint=_import_hint(error, entry),
        ) from error


def cause_of(error: BaseException, own: Path = Path(__file__).parent) -> str:
    """Return an error's message with file and line of the cause: the last frame of the traceback outside the folder `own`."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not {"importlib", "stevedore"} & set(Path(frame.filename).parts)
        and Path(frame.filename).parent != own
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _import_hint(error: BaseException, entry: PluginEntry) -> str:
    package = entry.target.split(":")[0].split(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.split(".")[0] != package:
            return f"install the package that provides the module {error.name!r}"
        return (
            f"the entry point names a module that the package lacks; reinstall {entry.distribution}"
        )
    return f"report it to the author of {entry.distribution}, or install another version of it"


def _nothing_selected(kind: str) -> ConfigError:
    usable = ", ".join(entry.name for entry in default_index().entries(kind) if entry.usable)
    return ConfigError(
        f"{with_article(kind)} section selects no plugin",
        hint=f"give `name` (one of: {usable or 'none is installed'}), or `path` and `attribute`",
    )
