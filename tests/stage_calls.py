"""How the tests run a stage, and what they know of the package's inside to do so: the other tests
of stages import these names from here."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from calls import STAGES  # noqa: F401
from numpy_evaluator import in_numpy
from oracle import (
    array,
    assert_close,
    in_float64,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig
from mlstm_pallas.formulas import gate_gradients, gates  # noqa: F401
from mlstm_pallas.formulas.gate_gradients import TileSums, only  # noqa: F401
from mlstm_pallas.formulas.normaliser import Normaliser, normaliser_gradients  # noqa: F401
from mlstm_pallas.formulas.tile_sizes import largest_block  # noqa: F401
from mlstm_pallas.launches.kernel_tiles import KernelSpec  # noqa: F401
from mlstm_pallas.launches.launch import Launch  # noqa: F401
from mlstm_pallas.launches.lowering import Lowering  # noqa: F401
from mlstm_pallas.operands.chunk_list import ChunkList, Entries  # noqa: F401
from mlstm_pallas.operands.scaled_rows import ScaledRows  # noqa: F401
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import dispatch
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.dimensions import MAX_TILE, InputGate, Problem, make_problem  # noqa: F401
from mlstm_pallas.problem.gpu import UNKNOWN, gpu_of, known_gpu  # noqa: F401
from mlstm_pallas.problem.steps import Steps  # noqa: F401
from mlstm_pallas.stages import HELPERS
from mlstm_pallas.stages import STAGES as ALL_STAGES

plain, tiles_class = planning.plain, dispatch.tiles_class


def plain_form(name):
    """The function of a stage's contract."""
    return getattr((ALL_STAGES | HELPERS)[name], name)


def run_stage(name, call, **inputs):
    """Runs a stage as its launch says; inputs: its operands and its options."""
    operands = (ALL_STAGES | HELPERS)[name].Operands
    arrays = {x: inputs.pop(x) for x in operands._fields if x in inputs}
    return dispatch.stage(name, {name: call})(operands(**arrays), **inputs)


def spec_of(shape, dtype, gpu=UNKNOWN, backend=None, **options):
    """The spec of a call for a shape (B, NH, S, DHQK, DHV), which is not padded, on any jax."""
    sizes = dict(zip(("B", "NH", "S", "DHQK", "DHV"), shape, strict=True))
    options = Options(backend=backend, **dict(return_last_states=True) | options)
    with mock.patch("mlstm_pallas.planning.backend.check_mosaic_gpu"):
        return planning.call_spec(options, sizes, jnp.dtype(dtype), gpu=gpu)


def launch_of(name, problem, dtype, lowering, tiles=None, **options):
    """How a stage runs in this lowering; tiles: fields that differ from the plan."""
    p = problem
    config = KernelConfig(**{f"{lowering.folder}_{name}": tiles} if tiles else {})
    shape = p.B, p.NH, p.S, p.DHQK, p.DHV
    spec = spec_of(shape, dtype, backend=lowering, config=config)
    spec = dataclasses.replace(spec, problem=p)
    call = planning.launch_of(spec, name, lowering, **options)
    assert call.lowering is lowering, (name, call)
    return call


def assert_dtypes(result, shapes):
    """The outputs of a stage have the dtypes of its plain form."""
    assert [y.dtype for y in jax.tree.leaves(result)] == [y.dtype for y in jax.tree.leaves(shapes)]


def compare_outputs(name, result, expected, bound):
    """Every output of a stage is within its bound, a function of its path and its dtype."""
    outputs = jax.tree.leaves_with_path(result)
    for (path, actual), desired in zip(outputs, jax.tree.leaves(expected), strict=True):
        path = jax.tree_util.keystr(path)
        assert_close(actual, desired, bound(path, actual.dtype), name + path)


def check_stage(name, call, x, bound, **options):
    """A stage of drawn operands agrees with its plain form in float64, in dtypes too; bound: as for
    compare_outputs, or one of all outputs."""
    run, expected = (
        jax.jit(lambda x, each=each: run_stage(name, each, **x, **options))
        for each in (call, plain(call.problem))
    )
    result, shapes = run(x), jax.eval_shape(expected, x)
    assert_dtypes(result, shapes)
    expected = in_float64(in_numpy(expected), x)
    compare_outputs(name, result, expected, bound if callable(bound) else lambda *_: bound)


# The operands of small stages: n heads, c chunks, s steps, k and v columns.
DRAWN = {
    "split_products": dict(a="nsk", b="nsv", r="ns"),
    "step_sums": dict(rows="nsk", weights="ns"),
    "vector_states": dict(added="nck", scaGamma="nc", initial="nk"),
}


def check_drawn(name, call, bound, dtype="bfloat16", layout="BNTH", **options):
    """check_stage of a small stage. Factors are in [0, 1], a third of them 0."""
    p, draw, x = call.problem, np.random.default_rng(0), {}
    sizes = dict(n=p.BNH, c=p.NC, s=p.S, k=p.DHQK, v=p.DHV)
    for key, axes in DRAWN[name].items():
        shape = [sizes[axis] for axis in axes]
        y = draw.normal(size=shape)
        if key in ("r", "scaGamma"):
            y = draw.uniform(-0.5, 1.0, shape).clip(0)
        of_call = key in ("a", "b", "rows")
        if of_call and layout == "BTNH":
            y = swapped(y.reshape(p.B, p.NH, p.S, -1))
        x[key] = array(y, dtype if of_call else "float32")
    check_stage(name, call, x, bound, **options)


def check_small_row(name, sizes, options, lowering):
    """check_drawn of a stage. sizes: B, NH, S, DHQK, DHV, L; options: tiles, and others of
    check_drawn."""
    p, tiles = Problem(*sizes, 1.0), options.get("tiles")
    options = {key: x for key, x in options.items() if key != "tiles"}
    splits = {key: options[key] for key in {"num_splits"} & {*options}}
    call = launch_of(name, p, "bfloat16", lowering, tiles, **splits)
    terms = dict(split_products=p.S, step_sums=p.L, vector_states=p.NC)[name]
    bound = tolerance("bfloat16" if name == "split_products" else "float32", terms)
    check_drawn(name, call, bound, **options)
