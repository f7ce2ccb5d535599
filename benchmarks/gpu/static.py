"""The kernels of a training step compiled for GPUs that aren't present: registers, shared memory and instructions.

Triton compiles for any architecture without a GPU, and its wheel contains NVIDIA's ptxas, cuobjdump and nvdisasm. Nothing runs.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.launches import count_step
from comera_rec.ops.launch import Launch
from comera_rec.tt import TTShape

ROWS = (10131227, 2202608, 8351593, 5461306, 7046547, 286181, 142572)  # Criteo Kaggle's tables above 100,000 rows

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def step_kernels(dim: int, rank: int, batch: int = 16_384, order: int = 2, **options: Any) -> dict[str, Launch]:
    """Name -> launch of each Triton kernel of a step that updates cores in backward; `options` of `count_step`."""
    shapes = [TTShape.for_table(rows, dim, tt_ranks=rank, order=order) for rows in ROWS]
    by_name: dict[str, Launch] = {}
    for launch in count_step(shapes, batch, **options).launches:
        name = launch.kernel.function.__name__.strip("_").replace("_", " ")
        if launch.kernel.constants.get("STEP", 1) > 1:
            name += " of groups"
        if order > 2:  # several lookups
            name += f" {launch.kernel.constants.get('N1', '')} {launch.kernel.constants.get('N2', '')}"
        by_name.setdefault(name, launch)
    return by_name


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel compiled for one architecture.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread's stack, for values that don't fit into registers.
        shared: bytes of shared memory of a program.
    """

    registers: int
    spilled: int
    shared: int
    cubin: bytes

    @cached_property
    def names(self) -> list[str]:
        """All instructions in the order of the code, without the padding after its end."""
        names = _INSTRUCTION.findall(_run("nvdisasm", self.cubin, "-c"))
        last = max(index for index, name in enumerate(names) if name.startswith("EXIT"))
        beyond = [index for index, name in enumerate(names) if index > last and not name.startswith(("NOP", "BRA"))]
        return names[: (beyond[-1] if beyond else last) + 1]


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compile what a launch would run on an NVIDIA GPU of a compute capability, such as 90."""
    kernel = _compile(launch, GPUTarget("cuda", architecture, 32))
    cubin = kernel.asm["cubin"]
    usage = _run("cuobjdump", cubin, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return Compiled(registers=int(match[1]), spilled=int(match[2]), shared=kernel.metadata.shared, cubin=cubin)


def compile_for_amd(launch: Launch, architecture: str = "gfx942") -> str:
    """Compile what a launch would run on an AMD GPU; return the assembly, whose comments state registers and spills."""
    assembly: str = _compile(launch, GPUTarget("hip", architecture, 64)).asm["amdgcn"]
    return assembly


def _compile(launch: Launch, target: GPUTarget):  # type: ignore[no-untyped-def]
    kernel, types = launch.kernel, dict[str, str]()
    for name, operand in launch.operands.items():
        types[name] = _TYPES[operand.dtype] if isinstance(operand, Tensor) else "fp32" if isinstance(operand, float) else "i32"
    source = ASTSource(
        fn=kernel.function,
        signature=types | dict.fromkeys(kernel.constants, "constexpr"),
        constexprs={(len(types) + k,): value for k, value in enumerate(kernel.constants.values())},
        attrs={(k,): [["tt.divisibility", 16]] for k in range(kernel.num_tensors)},  # as torch allocates
    )
    return triton.compile(source, target=target, options={"num_warps": kernel.num_warps, **kernel.OPTIONS})


def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
