"""Tensors of one decode step at a model's shapes, for benchmarks: rows in slots of their own, rings full of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cases.geometry import Geometry
from ..kernels.decode import Backend, gdn_packed_decode, gdn_replay_decode


@dataclass(frozen=True)
class StepDtypes:
    """Of activations, state and ring (d and k)."""

    activation: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32
    ring: torch.dtype = torch.float16


@dataclass(frozen=True, eq=False)
class BenchStep:
    """Arguments of both decode operators; row i lives in slot i + 1.

    ``token`` (q, k, v, a, b), ``layer`` (A_log, dt_bias), ``ring`` (d, k, g), ``cursor`` (write_pos, is_flush).
    """

    token: tuple[Tensor, ...]
    layer: tuple[Tensor, ...]
    state: Tensor
    ring: tuple[Tensor, ...]
    slots: Tensor
    cursor: tuple[Tensor, Tensor]
    out: Tensor

    def replay(self, backend: Backend) -> Tensor:
        """One step of replay decode."""
        run: Callable[..., Tensor] = gdn_replay_decode
        return run(
            *self.token, *self.layer, self.state, *self.ring, self.slots, *self.cursor, out=self.out, backend=backend
        )

    def packed(self, backend: Backend) -> Tensor:
        """One step of packed decode."""
        run: Callable[..., Tensor] = gdn_packed_decode
        return run(*self.token, *self.layer, self.state, self.slots, out=self.out, backend=backend)


def random_step(
    geometry: Geometry,
    buffer_len: int,
    cursor: list[tuple[int, bool]],
    *,
    seed: int,
    dtypes: StepDtypes = StepDtypes(),
    device: str = "cpu",
    spare_slots: int = 0,
) -> BenchStep:
    """A step whose rows stand at the given (write_pos, is_flush), gates as a trained model has them.

    ``spare_slots`` more slots than rows, for steps that use this one's memory elsewhere.
    """
    random = torch.Generator(device).manual_seed(seed)
    heads, value_heads = geometry.num_k_heads, geometry.num_v_heads
    key_dim, value_dim = geometry.head_k_dim, geometry.head_v_dim
    rows = len(cursor)
    slots = 1 + rows + spare_slots

    def draw(*shape: int, dtype: torch.dtype = dtypes.activation) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    # in place, piece by piece: the state of a large batch is most of what there is
    state = torch.empty(slots, value_heads, value_dim, key_dim, dtype=dtypes.state, device=device)
    state.normal_(generator=random)
    write_pos, is_flush = zip(*cursor, strict=True)
    return BenchStep(
        token=(
            draw(rows, heads, key_dim),
            draw(rows, heads, key_dim),
            draw(rows, value_heads, value_dim),
            draw(rows, value_heads),
            draw(rows, value_heads),
        ),
        layer=(
            draw(value_heads, dtype=torch.float32),
            draw(value_heads, dtype=torch.float32) - 4,
        ),
        state=state,
        ring=(
            draw(slots, value_heads, buffer_len, value_dim, dtype=dtypes.ring),
            draw(slots, heads, buffer_len, key_dim, dtype=dtypes.ring) / key_dim**0.5,
            -draw(slots, value_heads, buffer_len, dtype=torch.float32).abs() / buffer_len,
        ),
        slots=torch.arange(1, 1 + rows, dtype=torch.int32, device=device),
        cursor=(
            torch.tensor(write_pos, dtype=torch.int32, device=device),
            torch.tensor(is_flush, device=device),
        ),
        out=torch.empty(rows, value_heads, value_dim, dtype=dtypes.activation, device=device),
    )
