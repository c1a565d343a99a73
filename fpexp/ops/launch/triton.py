"""A launch of a Triton kernel: run on tensors, or compiled from their types for a GPU that need not be there.

And the product of tiles, which the interpreter has its own way of.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}

COMPUTE = {torch.float64: tl.float64}
"""What kernels compute in, by type of x; float32 for all else."""

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bits of bfloat16 numbers, as if they were integers, and knows not all precisions."""


@dataclass(frozen=True)
class Usage:
    """What one program takes: registers a thread, bytes of shared memory, bytes that spill to local memory a thread."""

    registers: int
    shared: int
    spilled: int


@dataclass(frozen=True)
class Launch:
    """`programs` programs of `kernel`, each of `warps` warps; pointers may be those of meta tensors to compile only.

    A thread has `registers` at most, as many as there are where None.
    """

    kernel: Any
    programs: int
    warps: int
    arguments: Mapping[str, Any]
    registers: int | None = None

    def run(self) -> None:
        """Start it on the device of its tensors; nothing happens where there is no program."""
        if not self.programs:
            return
        device = next(value.device for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[(self.programs,)](**self.arguments, num_warps=self.warps, maxnreg=self.registers)

    def compile(self, capability: int) -> Usage:
        """Compile for sm_`capability` as `run` would: whole numbers that 16 divides, and 1, are known to the compiler.

        Tensors are taken to begin at multiples of 16 bytes, as torch allocates them; a view that does not makes `run`
        compile another. Not in a process with TRITON_INTERPRET=1, where there are no kernels to compile.
        """
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(self._source(), target=target, options=self._options)
        return _usage(compiled, capability)

    @property
    def key(self) -> str:
        """The same for launches that compile to the same code."""
        return f"{self._source().hash()}-{self._options}"

    @property
    def _options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "maxnreg": self.registers}

    def _source(self) -> ASTSource:
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            kind = self._kind(parameter, value)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(i,)] = value
            elif isinstance(value, Tensor) or (value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    @staticmethod
    def _kind(parameter: Any, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"*{_TYPES[value.dtype]}"
        if value is None or parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            return "constexpr"
        return "i32" if -(2**31) <= value < 2**31 else "i64"


def run_all(launches: Mapping[str, Launch]) -> None:
    """Start them one after another."""
    for launch in launches.values():
        launch.run()


def _usage(compiled: Any, capability: int) -> Usage:
    """Ask the assembler's own tool about the machine code."""
    with tempfile.TemporaryDirectory(prefix="fpexp-cubin-") as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(word.split(":", 1) for word in told.split() if word.count(":") == 1)
    return Usage(int(fields["REG"]), int(compiled.metadata.shared), int(fields["STACK"]))


@triton.jit
def product(a, b, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """The matrix product of tiles, summed in COMPUTE; `bf16` makes factors bfloat16, all else is as `tl.dot` has it."""
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if _INTERPRETED:
        product = tl.dot(a.to(COMPUTE), b.to(COMPUTE), input_precision="ieee", out_dtype=COMPUTE)
    else:
        product = tl.dot(a, b, input_precision="tf32" if PRECISION == "bf16" else PRECISION, out_dtype=COMPUTE)
    return product
