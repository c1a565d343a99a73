"""Typed checking of plain values against annotations: dataclasses, and the signatures that `_target_` names.

A component's settings are the keyword-only parameters of its target, so that its constructor is its schema and a new
component needs no registration. Its other parameters are given by `fpexp.build`, never by the config.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fpexp.errors import UserError
from fpexp.ranges import Range

TARGET = "_target_"


@dataclass(frozen=True)
class Component:
    """A target by its dotted name and its checked settings; a setting may be a component again."""

    target: str
    settings: Mapping[str, Any]

    def resolve(self) -> Callable[..., Any]:
        """Return the object that `target` names."""
        return resolve_target(self.target, TARGET)


def resolve_target(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module.name`; a `UserError` names `key` when that fails."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise UserError(f"{key}: {name!r} is not a dotted name such as 'my_package.my_module.MyModel'")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever a module of the user's does while it is imported
        first = next(iter(str(error).splitlines()), "")
        raise UserError(f"{key}: cannot import {name!r}: {type(error).__name__}: {first}") from error
    if not callable(target):
        raise UserError(f"{key}: {name!r} cannot be called")
    return typing.cast(Callable[..., Any], target)


def settings_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of `target`, with annotations evaluated."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.replace(annotation=hints.get(parameter.name, Any))
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` when a choice is near `word`, else an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


class Checker:
    """Checks one raw tree. `root` is kept whole, so that a misplaced key can be pointed to where it belongs."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.leaves = [key for key, _ in leaves(root) if not key.startswith("choices.")]

    def check(self, annotation: Any, value: Any, key: str) -> Any:
        """Return `value` as the annotated type; raise a `UserError` that begins with the full key."""
        if annotation is Any:
            return value
        if value == "???":
            raise UserError(f"{key} has no value; set it with {key}=<value>")
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            return self._ranged(annotation, value, key)
        if origin in (typing.Union, types.UnionType):
            return self._optional(annotation, value, key)
        if origin is Literal:
            return self._literal(typing.get_args(annotation), value, key)
        if origin in (list, tuple):
            return self._sequence(annotation, value, key)
        if origin is collections.abc.Callable or annotation is Component:
            return self.component(value, key)
        if dataclasses.is_dataclass(annotation):
            return self._dataclass(annotation, value, key)
        return _scalar(annotation, value, key)

    def component(self, value: Any, key: str) -> Component:
        """Check a mapping with `_target_` against the signature that it names."""
        mapping = _mapping(value, key)
        name = mapping.get(TARGET)
        if not isinstance(name, str):
            raise UserError(f"{key}.{TARGET} must name what to build, such as 'fpexp.models.fp_mamba'")
        try:
            parameters = settings_of(resolve_target(name, f"{key}.{TARGET}"))
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"{key}.{TARGET}: cannot read the parameters of {name!r}: {error}") from error
        given = {field: item for field, item in mapping.items() if field != TARGET}
        required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
        self._check_names(given, parameters, required, key)
        plain_first = sorted(given, key=lambda n: isinstance(given[n], Mapping))  # a part may take over a bad value
        checked = {n: self.check(parameters[n].annotation, given[n], f"{key}.{n}") for n in plain_first}
        return Component(name, {n: checked[n] for n in given})

    def _dataclass(self, cls: Any, value: Any, key: str) -> Any:
        mapping = _mapping(value, key)
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {_key(field): field for field in dataclasses.fields(cls)}
        required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
        self._check_names(mapping, fields, required, key)
        prefix = f"{key}." if key else ""
        checked = {
            fields[n].name: self.check(hints[fields[n].name], item, f"{prefix}{n}") for n, item in mapping.items()
        }
        return cls(**checked)

    def _check_names(self, given: Mapping[str, Any], known: Mapping[str, Any], required: list[str], key: str) -> None:
        prefix = f"{key}." if key else ""
        for name in given:
            if name not in known:
                full = f"{prefix}{name}"
                raise UserError(f"unknown key '{full}'{self._suggest(str(name), known, prefix)}")
        for name in required:
            if name not in given:
                raise UserError(f"{prefix}{name} is missing; set it with {prefix}{name}=<value>")

    def _suggest(self, name: str, known: Mapping[str, Any], prefix: str) -> str:
        sibling = did_you_mean(name, known)
        if sibling:
            return sibling.replace("'", f"'{prefix}", 1)
        by_leaf = {leaf.rpartition(".")[2]: leaf for leaf in self.leaves if leaf != f"{prefix}{name}"}
        near = difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.6)
        if near:
            return f"; did you mean '{by_leaf[near[0]]}'?"
        return f"; known here: {', '.join(sorted(known))}" if known else "; this part has no settings"

    def _ranged(self, annotation: Any, value: Any, key: str) -> Any:
        base, *extras = typing.get_args(annotation)
        checked = self.check(base, value, key)
        for extra in extras:
            if isinstance(extra, Range) and checked not in extra:
                raise UserError(f"{key}={value} is out of range: it must be {extra}")
        return checked

    def _optional(self, annotation: Any, value: Any, key: str) -> Any:
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(annotation)):
            return None
        if len(options) == 1:
            return self.check(options[0], value, key)
        for option in options:
            try:
                return self.check(option, value, key)
            except UserError:
                continue
        raise UserError(f"{key}={value!r} must be one of: {', '.join(_type_name(o) for o in options)}")

    def _literal(self, choices: tuple[Any, ...], value: Any, key: str) -> Any:
        if value in choices:
            return value
        names = [str(choice) for choice in choices]
        raise UserError(f"unknown {key} '{value}'{did_you_mean(str(value), names)} ({', '.join(names)})")

    def _sequence(self, annotation: Any, value: Any, key: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{key}={value!r} must be a list, such as {key}=[1,2]")
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is tuple and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise UserError(f"{key}={value!r} must have {len(args)} entries")
            return tuple(self.check(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
        return origin(self.check(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))


def plain(value: Any) -> Any:
    """Return checked values as plain mappings, lists and scalars: the inverse of checking."""
    if isinstance(value, Component):
        return {TARGET: value.target, **{name: plain(item) for name, item in value.settings.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(field): plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _key(field: dataclasses.Field[Any]) -> str:
    """Return a field's key; a trailing underscore only avoids a Python keyword, as in `lambda_`."""
    return field.name.rstrip("_")


def _scalar(annotation: Any, value: Any, key: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**1000
    if annotation is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if annotation is float and number and math.isfinite(value):
        return float(value)
    if annotation in (bool, str) and isinstance(value, annotation):
        return value
    raise UserError(f"{key}={value!r} must be {_type_name(annotation)}")


def _type_name(annotation: Any) -> str:
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
    base = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    return names.get(base, getattr(base, "__name__", str(base)))


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={value!r} must be a mapping with its own keys, such as {key}.<name>=<value>")
    return value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the full key and the value of everything in a plain tree that is not a mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
