"""How this tests, in plain words: the plugin's CPU convolution and prefill against the plainest loops.

The convolution is compared with a sum written out token by token; the prefill with the packed decode operator fed one
token at a time, which has its own tests. A slot that a chunk must not read holds NaN, one it must not write is
compared by bytes. Splitting a prompt into chunks must give the same as one chunk.
"""

from __future__ import annotations

import pytest
import torch
from replay_parity.kernels.decode import gdn_packed_decode
from replay_parity.kernels.vllm_cpu import conv_prefill, conv_update, delta_prefill

H, HV, K, V, W, D = 2, 4, 8, 6, 4, 10
# sums of W products of unit normals in another order: observed at most 1.9e-6 over 300 seeds, 4.8e-7 on this one
CONV_ATOL = 4e-6
# a matrix product for a product and a sum, 4 tokens: observed at most 2.4e-7 over 300 seeds, 0 on this one
DELTA_ATOL = 1e-6

# q, k [T, H, K], v [T, HV, V], a, b [T, HV]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture()
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def naive_conv(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, D] and last inputs [D, W-1] of x [T, D] after the inputs ``before`` [D, W-1]."""
    outputs = []
    for token in x:
        window = torch.stack([*before.unbind(1), token], dim=1)
        y = torch.zeros(len(token))
        for tap in range(W):
            y = y + window[:, tap] * weight[:, tap]
        outputs.append(y * torch.sigmoid(y))
        before = window[:, 1:]
    return torch.stack(outputs), before


def conv_pages(draw: torch.Generator) -> torch.Tensor:
    """[N, D, W-1] as vLLM lays it out by default: channels contiguous, so a transposed view."""
    return torch.randn(5, W - 1, D, generator=draw).transpose(1, 2)


def test_conv_update_is_one_token_of_the_naive_sum(draw: torch.Generator) -> None:
    x, weight, pages = torch.randn(3, D, generator=draw), torch.randn(D, W, generator=draw), conv_pages(draw)
    slots = torch.tensor([4, 2, 1], dtype=torch.int32)
    expected = [naive_conv(x[row : row + 1], pages[slot], weight) for row, slot in enumerate([4, 2, 1])]
    out = conv_update(x, pages, weight, None, slots)
    for row, slot in enumerate([4, 2, 1]):
        torch.testing.assert_close(out[row], expected[row][0][0], rtol=0, atol=CONV_ATOL)
        assert torch.equal(pages[slot], expected[row][1])


@pytest.mark.parametrize("padding", [0, -1])
def test_conv_update_leaves_pages_of_padding_alone(draw: torch.Generator, padding: int) -> None:
    x, weight, pages = torch.randn(3, D, generator=draw), torch.randn(D, W, generator=draw), conv_pages(draw)
    pages[0] = torch.nan
    before = pages.clone()
    conv_update(x, pages, weight, None, torch.tensor([3, padding, padding], dtype=torch.int32))
    kept = [0, 1, 2, 4]
    assert torch.equal(pages[kept].contiguous().view(torch.int32), before[kept].contiguous().view(torch.int32))
    assert not torch.equal(pages[3], before[3])


def test_conv_prefill_is_the_naive_sum_of_each_chunk(draw: torch.Generator) -> None:
    """A first chunk of 5 in a slot of NaN, a later chunk of 2, shorter than the window, in a live one."""
    x, weight, pages = torch.randn(7, D, generator=draw), torch.randn(D, W, generator=draw), conv_pages(draw)
    pages[3] = torch.nan
    first, first_end = naive_conv(x[:5], torch.zeros(D, W - 1), weight)
    later, later_end = naive_conv(x[5:], pages[1], weight)
    out = conv_prefill(x, pages, weight, None, torch.tensor([3, 1], dtype=torch.int32), (5, 2), (False, True))
    torch.testing.assert_close(out, torch.cat([first, later]), rtol=0, atol=CONV_ATOL)
    assert torch.equal(pages[3], first_end) and torch.equal(pages[1], later_end)


def test_conv_bias_and_dtype(draw: torch.Generator) -> None:
    x = torch.randn(3, D, generator=draw).bfloat16()
    weight, bias, pages = torch.zeros(D, W), torch.randn(D, generator=draw), conv_pages(draw).bfloat16()
    expected = torch.nn.functional.silu(bias).expand(3, D).bfloat16()
    slots = torch.tensor([1, 2, 3])
    assert torch.equal(conv_update(x, pages, weight, bias, slots), expected)
    assert torch.equal(conv_prefill(x, pages, weight, bias, slots[:1], (3,), (False,)), expected)


def inputs(draw: torch.Generator, tokens: int) -> Inputs:
    """q, k, v, a, b for delta_prefill and gdn_packed_decode alike."""
    shapes = ((tokens, H, K), (tokens, H, K), (tokens, HV, V), (tokens, HV), (tokens, HV))
    q, k, v, a, b = (torch.randn(shape, generator=draw) for shape in shapes)
    return q, k, v, a, b


def some(tokens: Inputs, first: int, last: int) -> Inputs:
    """Tokens first to last - 1."""
    q, k, v, a, b = (part[first:last] for part in tokens)
    return q, k, v, a, b


def packed(tokens: Inputs, gates: tuple[torch.Tensor, torch.Tensor], state: torch.Tensor, slot: int) -> torch.Tensor:
    """The same tokens, one packed decode each."""
    slots = torch.tensor([slot])
    steps = [some(tokens, t, t + 1) for t in range(len(tokens[0]))]
    return torch.cat([gdn_packed_decode(*step, *gates, state, slots) for step in steps])


def test_prefill_is_packed_decode_token_by_token(draw: torch.Generator) -> None:
    """Chunks of 4 (first, slot of NaN) and 3 (over a state) in one call."""
    tokens, gates = inputs(draw, 7), (torch.rand(HV, generator=draw), torch.randn(HV, generator=draw))
    pages = torch.randn(4, HV, V, K, generator=draw)
    expected_pages = pages.clone()
    expected_pages[2] = 0
    pages[2] = torch.nan
    expected = torch.cat(
        [
            packed(some(tokens, 0, 4), gates, expected_pages, 2),
            packed(some(tokens, 4, 7), gates, expected_pages, 3),
        ]
    )
    out = delta_prefill(*tokens, *gates, pages, torch.tensor([2, 3]), (4, 3), (False, True))
    torch.testing.assert_close(out, expected, rtol=0, atol=DELTA_ATOL)
    torch.testing.assert_close(pages, expected_pages, rtol=0, atol=DELTA_ATOL)
    assert torch.equal(pages[:2], expected_pages[:2])


def test_prefill_in_two_chunks_is_bitwise_one_chunk(draw: torch.Generator) -> None:
    tokens, gates = inputs(draw, 7), (torch.rand(HV, generator=draw), torch.randn(HV, generator=draw))
    whole, halves = torch.zeros(2, HV, V, K), torch.zeros(2, HV, V, K)
    slots = torch.tensor([1])
    one = delta_prefill(*tokens, *gates, whole, slots, (7,), (False,))
    first = delta_prefill(*some(tokens, 0, 5), *gates, halves, slots, (5,), (False,))
    second = delta_prefill(*some(tokens, 5, 7), *gates, halves, slots, (2,), (True,))
    assert torch.equal(one, torch.cat([first, second])) and torch.equal(whole, halves)


def test_prefill_into_the_null_slot_changes_no_byte(draw: torch.Generator) -> None:
    """Warm-up runs name slot 0 only."""
    tokens, gates = inputs(draw, 3), (torch.rand(HV, generator=draw), torch.randn(HV, generator=draw))
    pages = torch.randn(2, HV, V, K, generator=draw)
    before = pages.clone()
    delta_prefill(*tokens, *gates, pages, torch.tensor([0]), (3,), (False,))
    assert torch.equal(pages, before)
