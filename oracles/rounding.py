"""What rounding may cost: the recurrence in float64 with those roundings that replay cannot avoid, and the summands.

Replay keeps the corrected value d and the key k of a pending token in the ring's dtype and the checkpoint in the
state's dtype. Between flushes the state it stands for is the decayed checkpoint and the decayed ring entries, so it
follows the recurrence with the rounded d and k; a flush folds its own token unrounded and rounds the checkpoint. The
token at hand is used unrounded everywhere else.

A value next to the middle between two numbers of the dtype may be rounded to either of them, since an implementation in
float32 knows it a little less well. Such an undecided value counts with one step of the dtype; steps that reach an
entry add up by squares.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .recurrence import L2_EPS

# keeps the logarithm of a decay that has underflowed finite
TINY = 1e-300
# how far from the middle an undecided value may lie, as a share of the size of what it is a sum of: 4 units of float32
UNDECIDED = 4 * 2.0**-24


def rounded_decode(
    state: Tensor,
    undecided: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    is_flush: Tensor,
    ring_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token a row: (o, S, squares of undecided steps in o, those in S), all float64.

    o [R, HV, V] is unrounded, S [R, HV, V, K] the state that replay stands for; ``state`` and ``undecided``
    [R, HV, V, K] are S and its squares before the token; q, k [R, H, K]; v [R, HV, V]; a, b [R, HV]; is_flush [R] bool.
    """
    query, key, alpha, beta = _gates_and_keys(q, k, a, b, A_log, dt_bias)
    decayed, carried = alpha * state, alpha.square() * undecided
    recalled = _read(decayed, key)
    d = beta * (v.double() - recalled)
    folded = decayed + _outer(d, key)
    appended = decayed + _outer(d.to(ring_dtype).double(), key.to(ring_dtype).double())
    flushes = is_flush[:, None, None, None]
    kept = torch.where(flushes, folded.to(state_dtype).double(), appended)

    step_d = undecided_step(d, ring_dtype, beta * (v.double().abs() + recalled.abs()).amax(-1, keepdim=True))
    step_k = undecided_step(key, ring_dtype, key.abs())
    steps = _outer(step_d.square(), key.square()) + _outer(d.square(), step_k.square())
    after = carried + torch.where(flushes, undecided_state(folded, state_dtype).square(), steps)
    return _read(folded, query), kept, _read(carried, query.square()), after


def carried_through(undecided: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Squares of undecided steps [HV, V, K] after tokens whose gates are a [T, HV]: each token's alpha shrinks them."""
    return torch.exp(2 * _log_decay(a, A_log, dt_bias).sum(0))[:, None, None] * undecided


def undecided_state(state: Tensor, dtype: torch.dtype) -> Tensor:
    """``undecided_step`` of states [..., V, K]; an entry is as well known as the largest of its head."""
    return undecided_step(state, dtype, state.abs().amax((-2, -1), keepdim=True))


def undecided_step(x: Tensor, dtype: torch.dtype, size: Tensor) -> Tensor:
    """The distance of the two numbers of ``dtype`` around x where x is undecided, else 0; float64 of x's shape.

    ``size``: of what x is a sum of, broadcast to x. Nothing is undecided where the dtype is float32 or wider.
    """
    if torch.finfo(dtype).bits >= 32:
        return torch.zeros_like(x)
    info = torch.finfo(dtype)
    exponent = torch.frexp(x).exponent.double() - 1.0
    step = (torch.exp2(exponent) * info.eps).clamp_min(info.smallest_normal * info.eps)
    from_middle = (step / 2 - (x - x.to(dtype).double()).abs()).abs()
    return torch.where(from_middle <= UNDECIDED * size, step, 0.0)


def summand_squares(
    held: Tensor,
    before: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of squares of what a token's o and S are sums of: (o [R, HV, V], S [R, HV, V, K], held afterwards), float64.

    Rounding is in proportion to the summands, not to what is left of them after they cancel, and adds up by squares. A
    dot product counts beside its summands: where those are of one sign it is rounded in proportion to itself.
    held [R, HV, V, K]: the squares that the state before the token is a sum of, checkpoint and ring entries; before:
    that state itself. Tokens as in ``rounded_decode``. Afterwards the ring's d is held as it is.
    """
    query, key, alpha, beta = _gates_and_keys(q, k, a, b, A_log, dt_bias)
    # exp(g) is off by |g| units where g is off by one
    decay = alpha * (1.0 - torch.log(alpha.clamp_min(TINY)))
    kept = decay.square() * held
    recalled = _read(alpha * before, key)
    appended = beta * (v.double() - recalled)
    d = beta.square() * (v.double().square() + recalled.square() + _read(kept, key.square()))
    states = kept + _outer(d, key.square())
    overlap = (key * query).sum(-1, keepdim=True)
    blocks = _read(alpha * before, query).square() + (appended * overlap).square()
    return _read(states, query.square()) + blocks, states, kept + _outer(appended, key).square()


def _gates_and_keys(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled q and k [R, HV, K], alpha [R, HV, 1, 1] and beta [R, HV, 1], float64."""
    heads_per_key = a.shape[1] // k.shape[1]
    query, key = (_l2_normalised(x.double()).repeat_interleave(heads_per_key, dim=1) for x in (q, k))
    gate = _log_decay(a, A_log, dt_bias)
    return query * k.shape[-1] ** -0.5, key, torch.exp(gate)[..., None, None], torch.sigmoid(b.double())[..., None]


def _log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), float64 of a's shape."""
    return -torch.exp(A_log.double()) * softplus(a.double() + dt_bias.double(), threshold=20.0)


def _read(state: Tensor, x: Tensor) -> Tensor:
    return (state * x[:, :, None, :]).sum(-1)


def _outer(d: Tensor, k: Tensor) -> Tensor:
    return d[..., None] * k[:, :, None, :]


def _l2_normalised(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
