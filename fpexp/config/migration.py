"""Configs that earlier versions saved, brought to the present schema. Everything that is not of them stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ONE_STEP = "one_step"
"""The only gradient there was while it was the setting `model.gradient`."""


LATER: Mapping[str, Mapping[str, Any]] = {
    "fpexp.models.fp_mamba": {"mlp_expand": 0.0, "decay": "exponential", "decay_scale": 8.0},
    "fpexp.channel_mixers.Householder": {"orthogonal": False},
    "fpexp.channel_mixers.DPLR": {"contractive": False, "orthogonal": False},
    "fpexp.fixed_point.Picard": {"backend": "auto"},
}
"""Settings that came after configs had been saved, with the values that stand for what there was before."""


def migrate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved tree with all settings of today, so that it has the fingerprint of the same run composed anew."""
    completed: Mapping[str, Any] = _complete(_with_gradient_group(raw))
    return completed


def _complete(node: Any) -> Any:
    """Add the settings that came later; what lacks none is returned itself."""
    if not isinstance(node, Mapping):
        return node
    target = node.get("_target_")
    later = LATER.get(target, {}) if isinstance(target, str) else {}
    missing = {name: value for name, value in later.items() if name not in node}
    inner = {name: _complete(value) for name, value in node.items()}
    unchanged = not missing and all(inner[name] is value for name, value in node.items())
    return node if unchanged else {**inner, **missing}


def _with_gradient_group(raw: Mapping[str, Any]) -> Mapping[str, Any]:
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
