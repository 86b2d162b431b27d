"""mlstm_chunkwise_states, for each option of its signature: h and the last states are those of
mlstm_chunkwise with the same option, and the states after N steps are its last states of these N.
test_calls.py has the numbers."""

import functools
import inspect
from typing import Any, NamedTuple

import compile_report
import jax
import numpy as np
import pytest
from numpy_evaluator import in_numpy
from oracle import (
    NAMES,
    OUTPUTS,
    assert_close,
    call_shapes,
    compare,
    error,
    random_inputs,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise, mlstm_chunkwise_states

S, N = 52, 16


class Case(NamedTuple):
    """Arguments, whether results depend on them, and what the call has that they differ from."""

    options: dict[str, Any]
    depends: bool = True
    plain: dict[str, Any] | None = None


SIGMOID = dict(input_gate="sigmoid", m_initial=None)
IDS = np.repeat([[4, 4, 0, 9], [2, 3, 5, 7]], [5, 9, 20, 18], axis=1)
WITHOUT_STATES = dict.fromkeys(NAMES[5:])
CASES = dict(
    c_initial=Case({}, plain=WITHOUT_STATES),
    n_initial=Case({}, plain=WITHOUT_STATES),
    m_initial=Case({}, plain=dict(m_initial=np.zeros((2, 2), "float32"))),
    every=Case(dict(every=32), depends=False),
    segment_ids=Case(dict(segment_ids=IDS)),
    sequence_lengths=Case(dict(sequence_lengths=np.array([9, 41]))),
    eps=Case(dict(eps=0.3)),
    norm_val=Case(dict(norm_val=3.0)),
    stabilize_correctly=Case(
        dict(stabilize_correctly=False, norm_val=3.0), plain=dict(norm_val=3.0)
    ),
    input_gate=Case(SIGMOID),
    normalize=Case(SIGMOID | dict(normalize=False), plain=SIGMOID),
    autocast_kernel_dtype=Case(dict(autocast_kernel_dtype="bfloat16")),
    state_dtype=Case(dict(state_dtype="bfloat16")),
    layout=Case(dict(layout="BTNH"), depends=False),
    backend=Case(dict(backend="interpret"), depends=False),
    config=Case(dict(config=KernelConfig(fused=True)), depends=False),
)  # fmt: skip


def test_each_option_has_a_case():
    options = inspect.signature(mlstm_chunkwise_states).parameters.keys() - {*NAMES[:5]}
    assert CASES.keys() == options


def arrays():
    """Small keys and gates that store little, so that the floor of the denominator counts."""
    x = random_inputs(1, 2, 2, S, 16, 8, i_shift=-3.0, f_shift=1.0)
    return {name: np.asarray(y) for name, y in x.items()} | dict(
        c_initial=np.asarray(x["c_initial"]) / 8, n_initial=np.asarray(x["n_initial"]) / 8
    )


def prefix(x, end):
    """The arguments of the first steps."""
    x = dict(x)
    axis = 1 if x.get("layout") == "BTNH" else 2
    for name in NAMES[:5]:
        x[name] = np.take(x[name], range(end), axis=axis)
    if "segment_ids" in x:
        x["segment_ids"] = x["segment_ids"][:, :end]
    if "sequence_lengths" in x:
        x["sequence_lengths"] = np.minimum(x["sequence_lengths"], end)
    return x


def called(function, x, **options):
    """The results of a function whose arrays are traced."""
    x = dict(backend="xla", layout="BNTH") | x | options
    traced = {name: y for name, y in x.items() if isinstance(y, np.ndarray)}
    static = {name: x[name] for name in x.keys() - traced}
    return in_numpy(lambda traced: function(**traced, **static))(traced)


@pytest.mark.quick("segment_ids", "sequence_lengths", "input_gate")
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_chunkwise_with_the_option(name):
    options, depends, plain = CASES[name]
    x = arrays() | options
    every = x.pop("every", N)
    if x.get("layout") == "BTNH":
        x |= {each: np.array(swapped(x[each])) for each in NAMES[:5]}
    h, last, states = called(mlstm_chunkwise_states, x, every=every)
    options = dict(return_last_states=True, chunk_size=every)  # they round alike
    expected, bound = called(mlstm_chunkwise, x, **options), tolerance("float32", S + 16)
    compare(OUTPUTS, (h, *last), jax.tree.leaves(expected), bound)
    assert [y.dtype for y in (h, *states)] == [y.dtype for y in jax.tree.leaves(expected)]
    of_c = tolerance(x.get("autocast_kernel_dtype") or x.get("state_dtype", "float32"), S + 16)
    for j in {0, S // every - 1}:
        _, desired = called(mlstm_chunkwise, prefix(x, (j + 1) * every), **options)
        for each, y, z in zip(OUTPUTS[1:], [y[:, j] for y in states], desired, strict=True):
            assert_close(y, z, of_c if each == "c" else bound, each)
    if depends:
        other = called(mlstm_chunkwise, arrays() | (plain or {}), **options)
        pairs = zip(*map(jax.tree.leaves, (expected, other)), strict=True)
        assert max(error(y, np.float64(z)) for y, z in pairs) > 100 * bound


def test_backend_and_config_are_those_of_the_call():
    """They change what runs, not the results."""

    def jaxpr(**options):
        x = dict(layout="BNTH", backend="xla") | options
        run = functools.partial(mlstm_chunkwise_states, every=N, **x)
        return str(jax.make_jaxpr(run)(*arrays().values()))

    assert "pallas_call" not in jaxpr()
    assert "pallas_call" in jaxpr(backend="interpret")
    assert jaxpr(config=KernelConfig(batch_invariant=True)) != jaxpr()


def test_the_fused_scan_stores_no_other_states():
    """Its chunks and those of the config are shorter."""
    config = KernelConfig(chunk_size=16, fused=True, triton_recurrent_fw_H=dict(siz_b_L=16))
    options = dict(every=64, layout="BNTH", backend="interpret", config=config)
    run = functools.partial(mlstm_chunkwise_states, **options)
    traced = jax.make_jaxpr(run)(*call_shapes(1, 2, 256, 16, 32))
    kernels = compile_report.equations(traced.jaxpr, "pallas_call")
    [scan] = (x for x in kernels if x.params["name"] == "recurrent_fw_H")
    assert scan.outvars[-1].aval.shape == (2, 256 // 64, 16, 32)
