"""What a Triton kernel compiles to for a GPU that isn't present: registers, spills, shared memory, occupancy and instructions.

Triton compiles for any architecture without a GPU, and its wheel contains NVIDIA's ptxas, cuobjdump and nvdisasm.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from comera_rec.ops.launch import Launch

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_WARP = 32
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_LABEL, _TARGET = re.compile(r"^(\.L_x_\d+):"), re.compile(r"BRA.*`\((\.L_x_\d+)\)")
KINDS = {
    "multiply-add": ("FFMA", "FFMA2", "HMMA", "HGMMA"),
    "global memory": ("LDG", "STG", "LDGSTS", "RED", "ATOMG"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM"),
    "barriers": ("BAR", "WARPSYNC", "DEPBAR", "LDGDEPBAR"),
    "shuffles": ("SHFL", "REDUX", "VOTE"),
}
"""Kinds of instructions -> their names in SASS; all others are "integer and other"."""


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """Capacities of one multiprocessor of an architecture."""

    registers: int
    shared: int
    """Bytes."""
    blocks: int
    warps: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; each block reserves 1 KiB of shared memory.
MULTIPROCESSORS = {
    80: Multiprocessor(registers=65536, shared=164 << 10, blocks=32, warps=64),
    90: Multiprocessor(registers=65536, shared=228 << 10, blocks=32, warps=64),
    100: Multiprocessor(registers=65536, shared=228 << 10, blocks=32, warps=64),
}
_RESERVED_SHARED = 1 << 10
_REGISTERS_AT_ONCE = 256  # unit in which a warp's registers are allocated


class WarpWork(NamedTuple):
    """What one warp takes of a multiprocessor to run some code once."""

    instructions: float
    cycles: float
    """Cycles of the first-level cache, one for 128 bytes that registers get from memory or give to it."""

    @classmethod
    def of(cls, names: Iterable[str]) -> WarpWork:
        """Count instructions by name."""
        names = list(names)
        accesses = [name.split(".") for name in names if name.startswith(("LD", "ST", "ATOM", "RED")) and "LDC" not in name]
        return cls(len(names), sum(4 if "128" in parts else 2 if "64" in parts else 1 for parts in accesses))

    def times(self, factor: float) -> WarpWork:
        """Run it several times."""
        return WarpWork(self.instructions * factor, self.cycles * factor)

    def plus(self, other: WarpWork) -> WarpWork:
        """Run both."""
        return WarpWork(self.instructions + other.instructions, self.cycles + other.cycles)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of a kernel that contains no other loop."""

    products: int
    """Multiply-adds in its body; Blackwell's packed instruction is two."""
    body: WarpWork
    around: WarpWork
    """The loop around it, with its body once; the whole kernel if there is none."""

    @property
    def size(self) -> int:
        """Instructions of its body."""
        return int(self.body.instructions)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel compiled for one architecture."""

    name: str
    architecture: int
    warps: int
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes of a thread's stack, for values that don't fit into registers."""
    shared: int
    """Bytes of shared memory per program."""
    cubin: bytes

    @cached_property
    def sass(self) -> str:
        """The disassembled code; nvdisasm takes most of a second."""
        return _run("nvdisasm", self.cubin, "-c")

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each instruction occurs in the code, without the padding after its end."""
        return Counter(name.split(".")[0] for name in self.names)

    @cached_property
    def names(self) -> list[str]:
        """All instructions, in the order of the code."""
        names = _INSTRUCTION.findall(self.sass)
        last = max(index for index, name in enumerate(names) if name.startswith("EXIT"))
        beyond = [index for index, name in enumerate(names) if index > last and not name.startswith(("NOP", "BRA"))]
        return names[: (beyond[-1] if beyond else last) + 1]

    @cached_property
    def work(self) -> WarpWork:
        """All code, once."""
        return WarpWork.of(self.names)

    @property
    def kinds(self) -> dict[str, int]:
        """Instructions by kind."""
        counts = {kind: sum(self.instructions[name] for name in names) for kind, names in KINDS.items()}
        return counts | {"integer and other": sum(self.instructions.values()) - sum(counts.values())}

    @cached_property
    def loops(self) -> list[Loop]:
        """The innermost loops that multiply and add, in the order of the code."""
        at, labels, spans = 0, {}, []
        for line in self.sass.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = at
            elif _INSTRUCTION.match(line):
                target = _TARGET.search(line)
                if target and target[1] in labels and at < len(self.names):  # a jump to itself ends the code
                    spans.append(range(labels[target[1]], at + 1))
                at += 1
        names = [name.split(".")[0] for name in self.names]
        loops = []
        for span in sorted(spans, key=lambda span: span.start):
            products = sum(1 + (names[index] == "FFMA2") for index in span if names[index] in KINDS["multiply-add"])
            if products and not any(other.start in span and other != span for other in spans):
                around = min(
                    (other for other in spans if span.start in other and other != span), key=len, default=range(len(names))
                )
                body, whole = (WarpWork.of(self.names[each.start : each.stop]) for each in (span, around))
                loops.append(Loop(products=products, body=body, around=whole))
        return loops

    @property
    def occupancy(self) -> float:
        """Warps that a multiprocessor holds at once, divided by the most that it could hold."""
        processor = MULTIPROCESSORS[self.architecture]
        of_warp = -(-self.registers * _WARP // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
        by_registers = processor.registers // (of_warp * self.warps)
        by_shared = processor.shared // (self.shared + _RESERVED_SHARED)
        programs = min(by_registers, by_shared, processor.blocks, processor.warps // self.warps)
        return programs * self.warps / processor.warps


def compile_launch(launch: Launch, tensors: Mapping[str, str], architecture: int) -> Compiled:
    """Compile what a launch would run on an NVIDIA GPU.

    Args:
        launch: the launch to compile.
        tensors: tensor argument -> Triton's name of its type, such as "*fp32"; aligned to 16 bytes, as torch allocates.
        architecture: 80, 90 or 100.
    """
    kernel = _compile(launch, tensors, GPUTarget("cuda", architecture, _WARP))
    cubin = kernel.asm["cubin"]
    usage = _run("cuobjdump", cubin, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return Compiled(
        name=launch.kernel.__name__,
        architecture=architecture,
        warps=launch.num_warps,
        registers=int(match[1]),
        spilled=int(match[2]),
        shared=kernel.metadata.shared,
        cubin=cubin,
    )


def compile_for_amd(launch: Launch, tensors: Mapping[str, str], architecture: str = "gfx942") -> str:
    """Compile what a launch would run on an AMD GPU; return the assembly, whose comments state registers and spills."""
    assembly: str = _compile(launch, tensors, GPUTarget("hip", architecture, 64)).asm["amdgcn"]
    return assembly


def _compile(launch: Launch, tensors: Mapping[str, str], target: GPUTarget):  # type: ignore[no-untyped-def]
    names = launch.kernel.arg_names
    types = {**tensors, **{name: "fp32" if isinstance(number, float) else "i32" for name, number in launch.numbers.items()}}
    source = ASTSource(
        fn=launch.kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in tensors},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.OPTIONS}
    return triton.compile(source, target=target, options=options)


def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
