"""Random kernels: nested branches, loops, early returns and device functions, here and in Triton's interpreter.

A seed is written down as a kernel of integer arithmetic whose conditions depend on the program; seven programs run it
in both interpreters, and every byte must agree. Integers leave no excuse. A kernel of which one statement is changed
must be found out, so that agreement means something.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from replay_parity.harness.interpreter import interpreted, run_stock

PROGRAMS = 7
HEAD = """
import triton
import triton.language as tl

@triton.jit
def helper(x, y, t):
{helper}
@triton.jit
def kernel(p_x, p_out, n):
    pid = tl.program_id(0)
    o = tl.arange(0, 8)
    a = tl.load(p_x + pid)
    b = tl.load(p_x + 8 + pid)
    c = 0
    v = o + a
    w = tl.load(p_x + o)
"""
HELPERS = (
    """
    if x > t:
        return x - t, y
    y = y + 1
    if t % 2 == 0:
        y = y * 2
        return t + 0, y
    return x + 1, y
""",
    """
    r = x
    for j in range(t % 4):
        if j == x % 3:
            r += j
        else:
            y = y + r % 7
    return r, y
""",
)
TAIL = "    tl.store(p_out + 64 + pid * 8 + o, v + w + a + b + c)\n"


class Writer:
    """Writes one kernel: a, b, c are scalars, v and w blocks of 8."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = 14
        self.names = 0

    def kernel(self) -> str:
        """The whole source."""
        body = self.block(1, in_loop=False) + self.block(1, in_loop=False)
        return HEAD.format(helper=self.random.choice(HELPERS)) + "\n".join(body) + "\n" + TAIL

    def scalar(self, depth: int = 0) -> str:
        draw, deeper = self.random, depth + 1
        match draw.randrange(8 if depth < 2 else 4):
            case 0:
                return str(draw.randint(-3, 5))
            case 1 | 2:
                return draw.choice("abc")
            case 3:
                return draw.choice(["pid", "n"])
            case 4:
                return f"({self.scalar(deeper)} {draw.choice('+-*')} {self.scalar(deeper)})"
            case 5:
                return f"tl.sum({self.vector(deeper)}, 0)"
            case 6:
                return f"tl.load(p_x + ({self.scalar(deeper)}) % 4 + 4)"
        # Triton's interpreter keeps a constant that is chosen at run time, and divides it as Python does
        return f"({self.scalar(deeper)} + 0 * pid if {self.condition()} else {self.scalar(deeper)} + 0 * pid)"

    def vector(self, depth: int = 0) -> str:
        draw, deeper = self.random, depth + 1
        match draw.randrange(6 if depth < 2 else 3):
            case 0:
                return "o"
            case 1 | 2:
                return draw.choice("vw")
            case 3:
                return f"({self.vector(deeper)} {draw.choice('+-*')} {self.scalar(deeper)})"
            case 4:
                chosen = f"{self.vector(deeper)} > {self.scalar(deeper)}"
                return f"tl.where({chosen}, {self.vector(deeper)}, {self.vector(deeper)})"
        return f"({self.vector(deeper)} + {self.vector(deeper)})"

    def condition(self) -> str:
        draw = self.random
        match draw.randrange(6):
            case 0:
                return "pid % 2 == 0"
            case 1:
                return f"pid < {draw.randint(0, 6)}"
            case 2:
                return f"({self.scalar(2)} > {self.scalar(2)}) and (a != b)"
            case 3:
                return f"not (b > {draw.randint(-2, 4)})"
        return f"{self.scalar(2)} {draw.choice(['<', '>', '==', '<=', '!='])} {self.scalar(2)}"

    def block(self, indent: int, *, in_loop: bool) -> list[str]:
        return [line for _ in range(self.random.randint(1, 3)) for line in self.statement(indent, in_loop=in_loop)]

    def statement(self, indent: int, *, in_loop: bool) -> list[str]:
        draw, pad = self.random, "    " * indent
        self.left -= 1
        match draw.randrange((14 if in_loop else 12) if indent < 4 and self.left > 0 else 4):
            case 0:
                return [f"{pad}{draw.choice('abc')} = 0 + ({self.scalar()}) % 1000"]
            case 1:
                return [f"{pad}{draw.choice('vw')} = ({self.vector()}) % 1000"]
            case 2:
                return [f"{pad}{draw.choice('abc')} += {draw.randint(-2, 3)} + pid"]
            case 4 | 5 | 6:
                return self.branch(indent, in_loop=in_loop)
            case 7 | 8:
                return self.loop(indent)
            case 9 | 12 | 13 if in_loop:
                return [f"{pad}if {self.condition()}:", f"{pad}    {draw.choice(['break', 'continue'])}"]
            case 10 if not in_loop:
                return [f"{pad}if {self.condition()}:", f"{pad}    tl.store(p_out + pid * 8, a)", f"{pad}    return"]
            case 11:
                return [f"{pad}a, v = helper(a, v, {self.scalar(1)})"]
        return [f"{pad}tl.store(p_out + pid * 8 + o, {self.vector()})"]

    def branch(self, indent: int, *, in_loop: bool) -> list[str]:
        pad = "    " * indent
        lines = [f"{pad}if {self.condition()}:", *self.block(indent + 1, in_loop=in_loop)]
        if self.random.random() < 0.5:
            lines += [f"{pad}elif {self.condition()}:", *self.block(indent + 1, in_loop=in_loop)]
        if self.random.random() < 0.5:
            lines += [f"{pad}else:", *self.block(indent + 1, in_loop=in_loop)]
        return lines

    def loop(self, indent: int) -> list[str]:
        draw, pad = self.random, "    " * indent
        self.names += 1
        name = f"i{self.names}"
        if draw.random() < 0.5:
            start, stop = draw.choice(["0", "1", "(b % 2)"]), draw.choice(["3", "pid", "(a % 4)", "n"])
            head = [f"{pad}for {name} in range({start}, {stop}):", f"{pad}    c += {name}"]
        else:
            head = [f"{pad}{name} = (pid + b * b) % 5", f"{pad}while {name} > 0:", f"{pad}    {name} -= 1"]
        return head + self.block(indent + 1, in_loop=True)


def load(source: str, folder: Path, name: str) -> Any:
    """The kernel of a source, which needs a file of its own."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def inputs(seed: int) -> torch.Tensor:
    return torch.randint(-4, 6, (16,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def ours(kernel: Any, seed: int, most: int) -> torch.Tensor:
    out = torch.zeros(128, dtype=torch.int32)
    with interpreted(unsupported="raise", max_programs=most):
        kernel[(PROGRAMS,)](inputs(seed), out, 3)
    return out


def stock(kernel: Any, seed: int) -> torch.Tensor:
    out = torch.zeros(128, dtype=torch.int32)
    run_stock(kernel, (PROGRAMS,), (inputs(seed), out, 3), {})
    return out


@pytest.mark.parametrize("seed", range(24))
def test_a_random_kernel(seed: int, tmp_path: Path) -> None:
    source = Writer(seed).kernel()
    kernel = load(source, tmp_path, f"kernel_{seed}")
    # all programs at once, and in groups of three
    assert torch.equal(ours(kernel, seed, PROGRAMS), stock(kernel, seed)), source
    assert torch.equal(ours(kernel, seed, 3), ours(kernel, seed, PROGRAMS)), source


def test_random_kernels_split_their_programs(tmp_path: Path) -> None:
    sources = [Writer(seed).kernel() for seed in range(24)]
    for construct in ("while", "for", "break", "continue", "return\n", "else:", "elif", "helper(a", " if "):
        assert sum(construct in source.split("def kernel")[1] for source in sources) >= 3, construct


def test_a_changed_kernel_is_found_out(tmp_path: Path) -> None:
    differing = 0
    for seed in range(8):
        source = Writer(seed).kernel()
        changed = source.replace("    w = tl.load(p_x + o)\n", "    w = tl.load(p_x + o) + (pid == 5)\n", 1)
        kernel, other = load(source, tmp_path, f"right_{seed}"), load(changed, tmp_path, f"changed_{seed}")
        differing += not torch.equal(ours(kernel, seed, PROGRAMS), ours(other, seed, PROGRAMS))
    # w may be overwritten before it is stored
    assert differing >= 4
