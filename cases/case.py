"""The frozen Case: one workload, JSON in and out, every bad field refused by its path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .geometry import Geometry
from .refusal import Refusal

SCHEMA = 1
DTYPES = ("float32", "bfloat16", "float16")
CACHE_MODES = ("none", "align")
REGIMES = ("exact", "model_like", "adversarial", "trained")


class CaseError(Refusal):
    """A Case that cannot be accepted; the message names the field by its path and says what would be right."""


@dataclass(frozen=True)
class Replay:
    """ReplaySSM settings: ring length in tokens, element types of ring, checkpoint state and activations."""

    buffer_len: int
    ring_dtype: str = "float32"
    state_dtype: str = "float32"
    activation_dtype: str = "float32"


@dataclass(frozen=True)
class Cache:
    """Prefix caching: ``mode`` "none" or "align"; ``block_size`` in tokens (without "align": of an attention block).

    ``num_blocks``: KV cache blocks, the NULL block among them, where they are so few that requests have to give way to
    others: every preemption is then one that vLLM comes to by itself. None: more than enough. Not with "align".
    """

    mode: str = "none"
    block_size: int = 0
    num_blocks: int | None = None


@dataclass(frozen=True)
class Graphs:
    """FULL CUDA graphs: a pure decode step is padded up to the next of ``capture_sizes`` (rows, ascending)."""

    capture_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """What fills the tensors: a regime of cases/inputs.py and the seed of every draw."""

    regime: str = "model_like"
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One request: ``prompt_len`` tokens in, ``output_len`` tokens out (the last one is sampled, never computed).

    ``shared_prefix_of`` names an earlier request whose first ``shared_prefix_len`` tokens are the same.
    """

    prompt_len: int
    output_len: int
    shared_prefix_of: int | None = None
    shared_prefix_len: int = 0


@dataclass(frozen=True)
class Step:
    """One scheduler step: first ``preempt`` and ``abort``, then ``rows`` of (request, num_tokens) in batch order."""

    rows: tuple[tuple[int, int], ...]
    preempt: tuple[int, ...] = ()
    abort: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One workload for every level. ``play`` of timeline.py says whether its steps are legal.

    ``guards`` is the sentence that says what the case is kept for, empty where it is just one of many.
    """

    id: str
    geometry: Geometry
    replay: Replay
    cache: Cache
    graphs: Graphs | None
    inputs: Inputs
    requests: tuple[Request, ...]
    steps: tuple[Step, ...]
    guards: str = ""

    def to_json(self) -> dict[str, Any]:
        """The Case as plain JSON values, schema 1."""
        geometry, replay = self.geometry, self.replay
        return {
            "schema": SCHEMA,
            "id": self.id,
            **({"guards": self.guards} if self.guards else {}),
            "geometry": {name: getattr(geometry, name) for name in _GEOMETRY},
            "replay": {name: getattr(replay, name) for name in _REPLAY},
            "cache": _cache_json(self.cache),
            "graphs": None if self.graphs is None else {"capture_sizes": list(self.graphs.capture_sizes)},
            "inputs": {"regime": self.inputs.regime, "seed": self.inputs.seed},
            "requests": [_request_json(request) for request in self.requests],
            "steps": [
                {"rows": [list(row) for row in step.rows], "preempt": list(step.preempt), "abort": list(step.abort)}
                for step in self.steps
            ],
        }

    def dumps(self) -> str:
        """One step or request a line: what a person can read and edit."""
        data = self.to_json()
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key not in _LISTS]
        for key in _LISTS:
            inner = ",\n".join(f"    {json.dumps(item)}" for item in data[key])
            lines.append(f"  {json.dumps(key)}: [\n{inner}\n  ]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(data: object) -> Case:
        """A Case from parsed JSON. Raises CaseError naming the field: unknown, missing, wrong type or out of range.

        Legality of the timeline is not looked at here, see timeline.play.
        """
        return _case(_Field("case", data))


_GEOMETRY = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_width")
_REPLAY = ("buffer_len", "ring_dtype", "state_dtype", "activation_dtype")
_LISTS = ("requests", "steps")


def load_case(path: str | Path) -> Case:
    """Read and check a Case file. Raises CaseError with one line for a missing, truncated or wrong file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CaseError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CaseError(f"{path}: is not UTF-8 text") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise CaseError(f"{path}: not whole JSON ({error.msg} at {where}); is the file truncated?") from None
    try:
        return Case.from_json(data)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None


def _cache_json(cache: Cache) -> dict[str, Any]:
    data: dict[str, Any] = {"mode": cache.mode, "block_size": cache.block_size}
    return data if cache.num_blocks is None else data | {"num_blocks": cache.num_blocks}


def _request_json(request: Request) -> dict[str, Any]:
    data: dict[str, Any] = {"prompt_len": request.prompt_len, "output_len": request.output_len}
    if request.shared_prefix_of is not None:
        data["shared_prefix_of"] = request.shared_prefix_of
        data["shared_prefix_len"] = request.shared_prefix_len
    return data


class _Field:
    """A JSON value and the path that leads to it."""

    def __init__(self, path: str, value: object) -> None:
        self.path, self.value = path, value

    def refuse(self, why: str) -> CaseError:
        return CaseError(f"{self.path}: {why}")

    def members(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Field]:
        if not isinstance(self.value, dict):
            raise self.refuse(f"must be an object, not {_name(self.value)}")
        known = required + optional
        for key in self.value:
            if key not in known:
                raise _Field(self._below(str(key)), None).refuse(f"unknown key; known here: {', '.join(known)}")
        for key in required:
            if key not in self.value:
                raise _Field(self._below(key), None).refuse("is missing")
        return {key: _Field(self._below(key), value) for key, value in self.value.items()}

    def items(self) -> list[_Field]:
        if not isinstance(self.value, list):
            raise self.refuse(f"must be a list, not {_name(self.value)}")
        return [_Field(f"{self.path}[{index}]", value) for index, value in enumerate(self.value)]

    def integer(self, low: int, high: int = 2**31 - 1) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.refuse(f"must be an integer, not {_name(self.value)}")
        if not low <= self.value <= high:
            raise self.refuse(f"must be from {low} to {high}, not {self.value}")
        return self.value

    def choice(self, names: tuple[str, ...]) -> str:
        if not isinstance(self.value, str) or self.value not in names:
            raise self.refuse(f"must be one of {', '.join(names)}, not {self.value!r}")
        return self.value

    def _below(self, key: str) -> str:
        return key if self.path == "case" else f"{self.path}.{key}"


def _name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a float"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _case(field: _Field) -> Case:
    required = ("schema", "id", "geometry", "replay", "cache", "graphs", "inputs", "requests", "steps")
    top = field.members(required, ("guards",))
    if top["schema"].value != SCHEMA:
        raise top["schema"].refuse(f"must be {SCHEMA}, the only schema this version reads")
    if not isinstance(top["id"].value, str) or not top["id"].value:
        raise top["id"].refuse("must be a string that is not empty")
    if "guards" in top and not isinstance(top["guards"].value, str):
        raise top["guards"].refuse("must be a string")
    return Case(
        id=top["id"].value,
        geometry=_geometry(top["geometry"]),
        replay=_replay(top["replay"]),
        cache=_cache(top["cache"]),
        graphs=_graphs(top["graphs"]),
        inputs=_inputs(top["inputs"]),
        requests=_some(top["requests"], _request),
        steps=_some(top["steps"], _step),
        guards=str(top["guards"].value) if "guards" in top else "",
    )


def _geometry(field: _Field) -> Geometry:
    members = field.members(_GEOMETRY)
    geometry = Geometry(*(members[name].integer(1, 4096) for name in _GEOMETRY))
    if geometry.num_v_heads % geometry.num_k_heads:
        raise members["num_v_heads"].refuse(
            f"must be a multiple of num_k_heads ({geometry.num_k_heads}), not {geometry.num_v_heads}"
        )
    return geometry


def _replay(field: _Field) -> Replay:
    members = field.members(_REPLAY)
    return Replay(members["buffer_len"].integer(1, 1024), *(members[name].choice(DTYPES) for name in _REPLAY[1:]))


def _cache(field: _Field) -> Cache:
    members = field.members(("mode", "block_size"), ("num_blocks",))
    mode = members["mode"].choice(CACHE_MODES)
    few = members.get("num_blocks")
    if few is not None and mode == "align":
        raise few.refuse('goes with mode "none" only; leave it out or set mode to "none"')
    block_size = members["block_size"].integer(0 if mode == "none" and few is None else 1)
    return Cache(mode, block_size, None if few is None else few.integer(2))


def _graphs(field: _Field) -> Graphs | None:
    if field.value is None:
        return None
    sizes = field.members(("capture_sizes",))["capture_sizes"]
    values = tuple(item.integer(1) for item in sizes.items())
    if not values or list(values) != sorted(set(values)):
        raise sizes.refuse("must be ascending row counts without repeats, at least one")
    return Graphs(values)


def _inputs(field: _Field) -> Inputs:
    members = field.members(("regime", "seed"))
    return Inputs(members["regime"].choice(REGIMES), members["seed"].integer(0))


def _request(field: _Field) -> Request:
    members = field.members(("prompt_len", "output_len"), ("shared_prefix_of", "shared_prefix_len"))
    prompt_len, output_len = members["prompt_len"].integer(1), members["output_len"].integer(1)
    if ("shared_prefix_of" in members) != ("shared_prefix_len" in members):
        raise field.refuse("shared_prefix_of and shared_prefix_len go together")
    if "shared_prefix_of" not in members:
        return Request(prompt_len, output_len)
    length = members["shared_prefix_len"].integer(1, prompt_len)
    return Request(prompt_len, output_len, members["shared_prefix_of"].integer(0), length)


def _step(field: _Field) -> Step:
    members = field.members(("rows",), ("preempt", "abort"))
    rows = tuple(_row(item) for item in members["rows"].items())
    named = {
        name: tuple(item.integer(0) for item in members[name].items())
        for name in ("preempt", "abort")
        if name in members
    }
    return Step(rows, named.get("preempt", ()), named.get("abort", ()))


def _row(field: _Field) -> tuple[int, int]:
    items = field.items()
    if len(items) != 2:
        raise field.refuse("must be [request, num_tokens]")
    return items[0].integer(0), items[1].integer(1)


def _some(field: _Field, read: Callable[[_Field], Any]) -> tuple[Any, ...]:
    items = field.items()
    if not items:
        raise field.refuse("must hold at least one entry")
    return tuple(read(item) for item in items)
