"""The JSON schema of an experiment's configuration."""

import dataclasses
import enum
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdtrain.config.options import OptionGroup, Range, field_docs
from spmdtrain.config.run_config import OPTIONS, RunConfig, config_as_json

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(default: RunConfig) -> dict[str, Any]:
    """Returns the JSON schema of a configuration as in the `config` of a run's config.json.

    A field whose type has no equal in JSON, such as a function, has a schema without a type.

    Args:
      default: A configuration of the class, with the default values.

    Returns:
      The schema, of JSON values: each field with its type, choices, range, default and docstring.
    """
    known = _object(type(default), config_as_json(default), "")
    return {"$schema": _DRAFT, "title": type(default).__name__} | known


def _object(of: type, defaults: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    docs, hints = field_docs(of), get_type_hints(of)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(of)}
    properties = {}
    for name, hint in fields.items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            inner = hint.PREFIX if issubclass(hint, OptionGroup) else f"{prefix}{name}."
            properties[name] = _object(hint, defaults[name], inner)
        else:
            row = OPTIONS.get(prefix + name)
            limits = _limits(row.option.range) if row is not None and row.option.range else {}
            properties[name] = _type(hint, limits) | {"default": defaults[name]}
        if docs.get(name):
            properties[name]["description"] = docs[name]
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _limits(of: Range) -> dict[str, Any]:
    limits = {"minimum": of.at_least, "exclusiveMinimum": of.above, "exclusiveMaximum": of.below}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _type(hint: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type; `limits` are those of its numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_type(each, limits) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [each.value for each in hint]}
    if hint is NoneType:
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint], **(limits if hint in (int, float) else {})}
    if origin in (tuple, list):
        kinds = [each for each in arguments if each is not ...]
        return {"type": "array", "items": _type(kinds[0], limits) if len(set(kinds)) == 1 else {}}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1], limits)}
    return {}
