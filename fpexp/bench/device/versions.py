"""What the check runs on, and the backend that `auto` takes there for each op."""

from __future__ import annotations

import torch

from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.environment import PACKAGES, describe_machine

PEERS = ("mamba_ssm", "causal_conv1d", "flash-linear-attention")


def items(setup: Setup) -> dict[str, Item]:
    """The versions and the card."""
    return {"versions": lambda: _versions(setup)}


def _versions(setup: Setup) -> list[Finding]:
    machine = describe_machine(setup.device, [], (*PACKAGES, *PEERS))
    del machine["command"]
    if setup.device != "cpu":
        card = torch.cuda.get_device_properties(0)
        machine |= {
            "cuda": torch.version.cuda,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_gib": card.total_memory / 2**30,
        }
    rows = [Finding("device", str(machine["device"]), numbers=machine)]
    rows += [Finding(name, str(machine["packages"][name])) for name in ("torch", "triton", "numba")]
    return rows + [Finding(f"backend of {op}", backend) for op, backend in machine["backends"].items()]
