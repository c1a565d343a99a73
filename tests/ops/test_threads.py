"""Fused kernels and torch share a machine's cores (config key `threads`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from helpers import tiny
from fpexp.fixed_point import Cap

torch.set_num_threads(1)
model = tiny("model=fp_mamba_h", "solver=sequential").model
for _ in range(2):
    model(torch.zeros(4, 3, dtype=torch.long), Cap(1)).logits.sum().backward()
    assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_the_first_use_of_a_kernel_leaves_torchs_threads_as_they_were() -> None:
    """In a fresh process, since numba starts its threads once. They may share an OpenMP runtime with torch."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "tests", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
