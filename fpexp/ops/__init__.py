"""Scans and sweeps, one folder each: `reference.py` is the truth, other backends are tested against it."""


def backends() -> dict[str, str]:
    """Return, for each op, the backend that it uses on this machine."""
    return {"selective_scan": "reference"}
