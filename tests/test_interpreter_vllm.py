"""vLLM's own Triton kernels, unmodified: the helpers of Model Runner V2, its sampler and its packed GDN decode.

Each runs here with all programs at once and is compared with a few lines of torch, and, bit by bit, with Triton's own
interpreter, on few programs since that takes up to 0.1 s for each. In bfloat16, which Triton's interpreter gets wrong,
the decode kernel is compared with torch only. Everything runs with bounds checked; that would have to be loosened if
vLLM's kernels touched anything outside their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.engine

BLOCK_SIZES = (16, 4)


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    from replay_parity.harness import cpu_platform

    cpu_platform.prepare()


def here(work: Callable[[], Any], **tables: list[Tensor]) -> Any:
    """Run a function of vLLM with its kernels interpreted here, pointer tables checked."""
    from replay_parity.harness.interpreter import interpreted

    with interpreted(unsupported="raise") as session:
        for name, targets in tables.items():
            for i, target in enumerate(targets):
                session.register(f"{name} {i}", target)
        result = work()
    assert (session.fallbacks, session.unchecked) == ({}, {})
    assert session.traffic.launches
    return result


def stock(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a function of vLLM with its kernels in Triton's interpreter."""
    from replay_parity.harness.interpreter import run_stock
    from triton.runtime.interpreter import InterpretedFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        run_stock(self, grid, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        return work()


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_positions_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    slots, starts, computed = ints(2, 0, 3), ints(0, 1, 6, 7), ints(10, 99, 4, 0)

    def run() -> tuple[Tensor, Tensor]:
        pos, seq_lens = torch.full((8,), -7, dtype=torch.int64), torch.full((6,), -7, dtype=torch.int32)
        prepare_pos_seq_lens(slots, starts, computed, pos, seq_lens)
        return pos, seq_lens

    pos, seq_lens = here(run)
    assert pos.tolist() == [4, 10, 11, 12, 13, 14, 0, -7]
    assert seq_lens.tolist() == [5, 15, 1, 0, 0, 0]
    assert all(same_bytes(a, b) for a, b in zip((pos, seq_lens), stock(run, monkeypatch), strict=True))


def pointers(targets: list[Tensor]) -> Tensor:
    return torch.tensor([target.data_ptr() for target in targets], dtype=torch.uint64)


def block_tables() -> list[Tensor]:
    """Two cache groups, 4 requests, rows of 6 and 24 blocks."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(1, 500, (4, width), generator=random, dtype=torch.int32) for width in (6, 24)]


def test_block_tables_are_gathered_and_padded_rows_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.block_table import _gather_block_tables_kernel

    tables, slots, counts = block_tables(), ints(3, 1), torch.tensor([[1, 4, 2, 6], [4, 16, 8, 24]], dtype=torch.int32)
    strides = ints(6, 24, dtype=torch.int64)
    outs = [torch.full_like(table, -7) for table in tables]

    def run() -> list[Tensor]:
        arguments = (slots, pointers(tables), pointers(outs), strides, counts, counts.stride(0), 2)
        _gather_block_tables_kernel[(2, 3)](*arguments, BLOCK_SIZE=16)
        return outs

    mine = here(run, tables=tables, out=outs)
    for group, (table, out) in enumerate(zip(tables, mine, strict=True)):
        for row, slot in enumerate((3, 1)):
            count = int(counts[group, slot])
            assert torch.equal(out[row, :count], table[slot, :count])
            assert (out[row, count:] == -7).all()
        assert (out[2] == 0).all()
        assert (out[3] == -7).all()
    outs = [torch.full_like(table, -7) for table in tables]
    assert all(same_bytes(a, b) for a, b in zip(mine, stock(run, monkeypatch), strict=True))


def slot_reference(tables: list[Tensor], slots: list[int], starts: list[int], pos: Tensor, width: int) -> Tensor:
    out = torch.full((len(tables), width), -1, dtype=torch.int64)
    for group, table in enumerate(tables):
        for row, slot in enumerate(slots):
            for token in range(starts[row], starts[row + 1]):
                if slot >= 0:
                    block, offset = divmod(int(pos[token]), BLOCK_SIZES[group])
                    out[group, token] = int(table[slot, block]) * BLOCK_SIZES[group] + offset
    return out


@pytest.mark.parametrize("block", [4, 32])
def test_slot_mappings(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel

    tables, slots, starts = block_tables(), ints(2, 0, -1), ints(0, 9, 10, 13)
    pos = torch.cat([torch.arange(60, 69), ints(33), torch.arange(3)]).long()

    def run() -> Tensor:
        out = torch.full((2, 16), -7, dtype=torch.int64)
        sizes, enabled, sharded = ints(*BLOCK_SIZES), torch.tensor([True, True]), torch.tensor([False, False])
        arguments = (16, slots, starts, pos, pointers(tables), ints(6, 24, dtype=torch.int64), sizes, enabled, sharded)
        constants = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": block}
        _compute_slot_mappings_kernel[(2, 4)](*arguments, out, out.stride(0), 0, **constants)
        return out

    mine = here(run, tables=tables)
    assert torch.equal(mine, slot_reference(tables, slots.tolist(), starts.tolist(), pos, 16))
    if block == 32:
        assert same_bytes(mine, stock(run, monkeypatch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_and_random_sampling(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(dtype)
    slots, seeds, pos = ints(1, 0, 2), ints(11, 12, 13, dtype=torch.int64), ints(5, 6, 7, dtype=torch.int64)

    def run(temperature: Tensor) -> Tensor:
        drawn: Tensor = gumbel_sample(logits, slots, temperature, seeds, pos, apply_temperature=True, is_drafting=False)
        return drawn

    greedy, warm = torch.zeros(3), torch.tensor([0.7, 0.0, 1.3])
    assert torch.equal(here(lambda: run(greedy)), logits.float().argmax(1))
    sampled = here(lambda: run(warm))
    assert sampled[0] == logits[0].float().argmax()
    assert (sampled != logits.float().argmax(1)).any()
    if dtype is torch.float32:
        assert torch.equal(sampled, stock(lambda: run(warm), monkeypatch))


def test_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    slots, temperature = ints(1, 0, 2), torch.tensor([0.7, 0.0, 1.0])

    def run() -> Tensor:
        out = logits.clone()
        apply_temperature(out, slots, temperature)
        return out

    mine = here(run)
    assert torch.equal(mine, torch.stack([logits[0], logits[1] / 0.7, logits[2]]))
    assert same_bytes(mine, stock(run, monkeypatch))


class Decode:
    """One packed decode step of vLLM: 4 rows, one of them padding, H 1, HV 2, K 16, V 32."""

    def __init__(self, dtype: torch.dtype, state: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        self.qkv = draw(4, 2 * 16 + 2 * 32).to(dtype)
        self.gates = draw(4, 2).to(dtype), draw(4, 2).to(dtype)
        self.layer = draw(2), draw(2)
        self.state = draw(6, 2, 32, 16).to(state)
        self.slots = ints(3, 1, 0, 5)

    def run(self) -> tuple[Tensor, Tensor]:
        from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
            fused_recurrent_gated_delta_rule_packed_decode as packed_decode,
        )

        out, state = torch.full((4, 1, 2, 32), 7.0).to(self.qkv.dtype), self.state.clone()
        packed_decode(self.qkv, *self.gates, *self.layer, 0.25, state, out, self.slots, use_qk_l2norm_in_kernel=True)
        return out, state

    def reference(self) -> tuple[Tensor, Tensor]:
        """The gated delta rule in float32: out [4, 1, 2, 32] and all states [6, 2, 32, 16]."""
        q, k, v = self.qkv[:, :16].float(), self.qkv[:, 16:32].float(), self.qkv[:, 32:].float()
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        a, b = (x.float() for x in self.gates)
        decay = (-self.layer[0].exp() * torch.nn.functional.softplus(a + self.layer[1])).exp()
        out, states = torch.zeros(4, 1, 2, 32), self.state.float()
        for row, slot in enumerate(self.slots.tolist()):
            if slot == 0:
                continue
            for head in range(2):
                state = states[slot, head] * decay[row, head]
                delta = (v[row].view(2, 32)[head] - state @ k[row]) * b[row, head].sigmoid()
                states[slot, head] = state = state + delta[:, None] * k[row][None, :]
                out[row, 0, head] = state @ q[row] * 0.25
        return out.to(self.qkv.dtype), states.to(self.state.dtype)


# largest difference to the reference, relative to 1: the rounding of the stored type, twice
UNITS = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["fp32-state", "bf16-state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_packed_decode(dtype: torch.dtype, state: torch.dtype) -> None:
    step = Decode(dtype, state)
    out, states = here(step.run)
    right, right_states = step.reference()
    assert (out.float() - right.float()).abs().max() <= UNITS[dtype] * right.float().abs().max()
    assert (states.float() - right_states.float()).abs().max() <= UNITS[state] * right_states.float().abs().max()
    assert (out[2] == 0).all()
    untouched = [0, 2, 4]
    assert same_bytes(states[untouched], step.state[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_packed_decode_is_bitwise_the_stock_interpreters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decode(dtype, dtype)
    for mine, theirs in zip(here(step.run), stock(step.run, monkeypatch), strict=True):
        assert same_bytes(mine, theirs)


def test_a_state_that_is_too_short_is_reported() -> None:
    from replay_parity.harness.interpreter import BadAccess

    step = Decode(torch.float32, torch.float32)
    step.state = step.state[:5].clone()
    with pytest.raises(BadAccess, match=r"fused_recurrent.py:\d+ in fused_.*program \(0, 6, 0\).*load outside h0"):
        here(step.run)
