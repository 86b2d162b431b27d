"""The one table of the lowerings: which of them runs a stage, and where its kernel is.

A stage that a lowering does not have, or cannot run, falls to the next one. The function of a stage
has one name and one signature in every room: ``stages/`` (plain jnp), ``triton/`` and
``mosaic_gpu/``. A room is imported when a call runs there.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mlstm_pallas import gate_gradients, gates
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Kernel, Lowering, StageCall, StageConfig
from mlstm_pallas.stages import STAGES, recurrence
from mlstm_pallas.triton.launch import HAS_TRITON

_KERNELS = {
    "triton": {*STAGES},
    "mosaic_gpu": {
        *("chunk_gates", "recurrent_fw_C", "parallel_fw_H", "parallel_fw_P", "recurrent_fw_H"),
        *("parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV"),
    },
}


def _without_call(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs, call, **options: function(*inputs, **options)


# Functions beside the stages: the module of each room that has a kernel, and the plain form.
_HELPERS: dict[str, tuple[dict[str, str], Callable[..., Any]]] = {
    "split_products": (
        {"triton": "recurrence", "mosaic_gpu": "recurrence"},
        recurrence.split_products,
    ),
    "add_decayed": ({"triton": "recurrence"}, recurrence.add_decayed),
    "step_sums": (
        {"triton": "parallel_fw_P", "mosaic_gpu": "step_sums"},
        recurrence.step_sums,
    ),
    "vector_states": ({"mosaic_gpu": "vector_states"}, _without_call(gates.vector_states)),
    "step_gradients": (
        {"mosaic_gpu": "step_gradients"},
        _without_call(gate_gradients.step_gradients),
    ),
}


def lowerings(first: Lowering) -> tuple[Lowering, ...]:
    """The lowering, then those that a stage falls to."""
    if first.room != Lowering.MOSAIC_GPU.room:
        return (first,)
    triton = Lowering.INTERPRET if first.interpret else Lowering.TRITON
    return (first, triton, Lowering.XLA) if HAS_TRITON else (first, Lowering.XLA)


def kernel(stage: str, room: str) -> Kernel | None:
    """The facts of a stage's kernel; None: the room has none."""
    return _facts(stage, room) if stage in _KERNELS.get(room, ()) else None


@functools.cache
def _facts(stage: str, room: str) -> Kernel:
    facts: Kernel = importlib.import_module(f"mlstm_pallas.{room}.{stage}").KERNEL
    return facts


def configured(stage: str) -> Kernel:
    """The facts of the kernel whose tiles are a StageConfig's, not those of the one inside."""
    return _facts(stage, Lowering.TRITON.room)


def choose(
    stage: str, first: Lowering, config: StageConfig, problem: Problem, dtype: jnp.dtype
) -> tuple[str, StageConfig]:
    """The room of the kernel that runs a stage, and its tiles, not clamped."""
    *others, last = lowerings(first)
    for index, lowering in enumerate(others):
        if (facts := kernel(stage, lowering.room)) is None:
            continue
        tiles = config.of(lowering.room) or facts.heuristic(problem, dtype)
        tiles = tiles.replace(num_splits=config.num_splits)
        final = index == len(others) - 1  # the last kernel before plain jnp
        if facts.takes(tiles, problem, dtype) and (final or facts.pays(tiles, problem)):
            return lowering.room, tiles
    return last.room, config


def lowering_in(room: str, first: Lowering) -> Lowering:
    """The lowering that is, or that the first one falls to, in a room."""
    return next(x for x in lowerings(first) if x.room == room)


def run(name: str, *inputs: Any, call: StageCall, **options: Any) -> Any:
    """Runs a stage on the call's lowering; a function beside the stages on the first one from there
    on that has a kernel of it."""
    module = name
    if name in _HELPERS:
        modules, plain = _HELPERS[name]
        lowering = next((x for x in lowerings(call.lowering) if x.room in modules), None)
        if lowering is None:
            return plain(*inputs, call=call, **options)
        module, call = modules[lowering.room], dataclasses.replace(call, lowering=lowering)
    function = getattr(importlib.import_module(f"mlstm_pallas.{call.lowering.room}.{module}"), name)
    return function(*inputs, call=call, **options)
