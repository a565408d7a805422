"""Question: the messages in which a judge is asked to rate a sample, rendered from Jinja templates in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, RewardError, nearest
from dovetail.interfaces import Sample
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.models.reading import plain_text

if TYPE_CHECKING:
    from jinja2 import Template

VARIABLES = ("prompt", "messages", "response", "ground_truth", "data_source", "extra_info")
"""The variables that a template may use."""
_FILES = (".jinja", ".jinja2", ".j2", ".txt", ".md")
"""The endings by which a template's text is taken for the path of a file."""


class Question:
    """Renders the messages for a judge from the configured templates.

    The sample's data are values of the template's variables; template syntax in them is not evaluated. A template can't call into Python
    or change its values.

    Args:
        config: the config, with the templates.

    Raises:
        ConfigError: a template has errors, or uses an unknown variable; or neither uses `response`.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._user, named = _compiled(config.template, "template")
        self._system = None
        if config.system is not None:
            self._system, also = _compiled(config.system, "system")
            named |= also
        if "response" not in named:
            raise ConfigError(
                f"reward manager 'judge': template={config.template[:80]!r} does not use the variable 'response', so the judge would not see "
                "what it has to judge",
                hint=f"add {{{{ response }}}}; if it is the path of a file, its name must end with {', '.join(_FILES)}",
            )

    def messages(self, sample: Sample) -> list[dict[str, str]]:
        """Return the system message, if configured, and the user message for the judge.

        Raises:
            RewardError: the templates can't be filled from this sample.
        """
        row, prompt = sample.prompt, sample.prompt.raw
        values = {
            "prompt": plain_text(prompt),
            "messages": [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else prompt,
            "response": sample.text,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
            "extra_info": row.extra_info or {},
        }
        turns = [("system", self._system), ("user", self._user)]
        try:
            return [
                {"role": role, "content": template.render(values)}
                for role, template in turns
                if template is not None
            ]
        except Exception as error:
            raise RewardError(
                f"the judge's template can't be rendered for sample {sample.sample_id}: {type(error).__name__}: {error}",
                hint="give a default for a value that rows may lack: {{ extra_info.get('rubric', '') }}",
            ) from error


def _compiled(text: str, key: str) -> tuple[Template, set[str]]:
    """Return a compiled template, and the variables that it uses."""
    from jinja2 import StrictUndefined, TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Escaping is for HTML; the judge gets plain text.
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    text = _text_of(text, key)
    try:
        named = meta.find_undeclared_variables(environment.parse(text))
        template: Template = environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(
            f"reward manager 'judge': {key} is not a valid Jinja template: {error}",
            hint="correct the template; {{ prompt }} and {{ response }} stand for the sample's texts",
        ) from error
    unknown = sorted(named - set(VARIABLES))
    if unknown:
        close = nearest(unknown[0], VARIABLES)
        raise ConfigError(
            f"reward manager 'judge': {key} uses an unknown variable {unknown[0]!r}"
            + (f"; nearest: {close!r}" if close else ""),
            hint=f"use only these variables: {', '.join(VARIABLES)}",
        )
    return template, named


def _text_of(text: str, key: str) -> str:
    """Return a template's text: `text` itself, or the file's content if `text` is a path with a suffix of `_FILES`."""
    if "\n" in text or "{" in text or Path(text).suffix not in _FILES:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"reward manager 'judge': the file {key}={text!r} can't be read: {error}",
            hint=f"set {key} to the template's text, or to the path of its file",
        ) from error
