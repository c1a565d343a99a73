"""Configs that earlier versions saved, brought to the present schema. Everything that is not of them stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONE_STEP = "one_step"
"""The only gradient there was while it was the setting `model.gradient`."""


def migrate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved tree with the gradient as a group of its own; before that it was in the model, or nowhere."""
    model, choices = raw.get("model"), raw.get("choices")
    if "gradient" in raw or not isinstance(model, Mapping) or not isinstance(choices, Mapping):
        return raw
    if model.get("gradient", ONE_STEP) != ONE_STEP:
        return raw
    return {
        **raw,
        "model": {name: value for name, value in model.items() if name != "gradient"},
        "gradient": {"_target_": "fpexp.fixed_point.OneStep"},
        "choices": {**choices, "gradient": ONE_STEP},
    }
