"""The reward function `json_schema`: whether the answer is JSON and valid by a schema."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from dovetail.errors import ConfigError, PluginNeedsError
from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards_extra.config import JsonSchemaConfig

_FENCE = re.compile(r"^```[^\n`]{0,32}$", re.MULTILINE)
_MISSING = object()


class JsonSchema(RewardFunction):
    """Scores a JSON answer: `parse_score`·parsed + `valid_score`·valid + `fields_score`·fields.

    parsed: the answer is JSON (without NaN and infinities). valid: the schema accepts the answer, by draft 2020-12 or the draft that
    `$schema` names; `$ref` may refer to the schema itself, never to the network. fields: the share of the schema's required properties that
    are present and valid; without required properties, of all properties. With `compare`, fields is the share of the ground truth's fields,
    at every depth, that are present and equal.

    The schema comes from the config, else from the sample's ground truth. With `compare` and no configured schema, every JSON value is
    valid.
    """

    name = "json_schema"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = JsonSchemaConfig

    def __init__(self, config: JsonSchemaConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if importlib.util.find_spec("jsonschema") is None:
            raise PluginNeedsError(
                "reward function 'json_schema' needs the package jsonschema, which is not installed",
                hint="pip install 'dovetail-rewards-extra[json]'",
            )
        self._schema = dict(config.schema) if config.schema is not None else None
        problem = None if self._schema is None else _bad_schema(self._schema)
        if problem:
            raise ConfigError(
                f"reward function 'json_schema': the setting `schema` is not a valid JSON Schema: {problem}"
            )

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, its parts `parsed` and `valid` (0 or 1) and `fields` in [0, 1], and `pred`: the value as sorted JSON, or None."""
        value = _parsed(self._text(solution_str))
        if value is _MISSING:
            return {"score": 0.0, "parsed": 0.0, "valid": 0.0, "fields": 0.0, "pred": None}
        schema = self._schema
        if schema is None:
            schema = {} if self.config.compare else _object(ground_truth) or {}
        valid = _is_valid(schema, value)
        if self.config.compare:
            fields = _equal_share(value, _value(ground_truth))
        else:
            fields = _share(schema, value)
        score = self.config.parse_score + self.config.valid_score * valid
        return {
            "score": score + self.config.fields_score * fields,
            "parsed": 1.0,
            "valid": float(valid),
            "fields": fields,
            "pred": _sorted_json(value),
        }

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        if config.compare:
            if _value(ground_truth) is _MISSING:
                return f"ground truth {ground_truth!r:.80} is not a JSON value"
            return None
        if config.schema is not None:
            return None
        schema = _object(ground_truth)
        if schema is None:
            return f"ground truth {ground_truth!r:.80} is not a JSON Schema; expected a JSON object"
        problem = _bad_schema(schema)
        return f"the ground truth is not a valid JSON Schema: {problem}" if problem else None

    def _text(self, text: str) -> str:
        if self.config.extract == "whole":
            return text
        fences = [match.span() for match in _FENCE.finditer(text)]
        if len(fences) >= 2:
            # With an odd number of fences, the last block is not closed, so the block before it counts.
            opening, closing = fences[-3:-1] if len(fences) % 2 else fences[-2:]
            return text[opening[1] : closing[0]]
        return text if self.config.extract == "auto" else ""


def _parsed(text: str) -> Any:
    """Return the JSON value of a text; `_MISSING` if the text is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _MISSING


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _value(ground_truth: GroundTruth) -> Any:
    """Return a ground truth as a JSON value: a text is parsed, other values are returned unchanged."""
    if isinstance(ground_truth, str):
        return _parsed(ground_truth)
    return _MISSING if ground_truth is None else ground_truth


def _object(ground_truth: GroundTruth) -> dict[str, Any] | None:
    value = _value(ground_truth)
    return dict(value) if isinstance(value, Mapping) else None


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    # The default registry would fetch schemas that `$ref` names from the network.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=EMPTY_REGISTRY)


def _bad_schema(schema: Mapping[str, Any]) -> str | None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"{error.message[:200]} at {error.json_path}"
    return None


def _is_valid(schema: Mapping[str, Any], value: object) -> bool:
    """Return whether the schema accepts a value; False if the value is nested too deeply for the validator."""
    try:
        return bool(_validator(schema).is_valid(value))
    except RecursionError:
        return False


def _share(schema: Mapping[str, Any], value: object) -> float:
    """Return the share of the required properties, or without these of all properties, that a value has in valid form.

    If the schema names no properties, return 1 for a valid value, else 0.
    """
    properties = schema.get("properties")
    wanted = schema.get("required") or list(properties or ())
    if not wanted:
        return float(_is_valid(schema, value))
    if not isinstance(value, Mapping):
        return 0.0
    validator = _validator(schema)
    right = [
        name in value and _accepts(validator, properties, name, value[name]) for name in wanted
    ]
    return sum(right) / len(wanted)


def _accepts(validator: Any, properties: Any, name: str, value: Any) -> bool:
    """Return whether the schema of the property `name` accepts the property's value; `$ref` is resolved in the whole schema."""
    part = properties.get(name, True) if isinstance(properties, Mapping) else True
    try:
        return next(iter(validator.descend(value, part)), None) is None
    except RecursionError:
        return False


def _equal_share(value: object, truth: object) -> float:
    """Return the share of the ground truth's fields that the value has, compared without recursion."""
    right = total = 0
    pairs = [(value, truth)]
    while pairs:
        mine, theirs = pairs.pop()
        if isinstance(theirs, Mapping) and theirs:
            mine = mine if isinstance(mine, Mapping) else {}
            pairs += [(mine.get(key, _MISSING), part) for key, part in theirs.items()]
        elif isinstance(theirs, (list, tuple)) and theirs:
            mine = mine if isinstance(mine, list) else []
            pairs += [
                (mine[i] if i < len(mine) else _MISSING, part) for i, part in enumerate(theirs)
            ]
        else:
            total += 1
            right += type(mine) is not object and _same(mine, theirs)
    return right / total


def _same(mine: object, theirs: object) -> bool:
    """Return whether two values are equal as JSON: true is not 1, but 1 is 1.0."""
    return isinstance(mine, bool) == isinstance(theirs, bool) and bool(mine == theirs)


def _sorted_json(value: object) -> str | None:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except RecursionError:
        return None
