"""Products of float32 have the precision that the package promises, about 1e-7: seen in the jaxpr
and the Triton IR, without a GPU."""

import functools

import compile_report
import costs
import jax.numpy as jnp
import pytest
from jax.lax import DotAlgorithmPreset, Precision
from oracle import HELPERS, random_inputs, results_of

from mlstm_pallas import KernelConfig, mlstm_chunkwise
from mlstm_pallas.problem.dimensions import Problem

SIX_PRODUCTS = DotAlgorithmPreset.BF16_BF16_F32_X6
H200 = compile_report.DEVICES["H200"]

CASES = {"materialised": dict(fused=False), "fused": dict(fused=True)}
BOTH = pytest.mark.parametrize("case", CASES)


@functools.cache
def jaxpr_of(case, precision=None, dtype="float32", backend="triton"):
    """The jaxpr of the outputs, the last states and all gradients, with initial states and two
    heads, so that sequences are split."""
    config = KernelConfig(chunk_size=64, precision=precision, **CASES[case])
    inputs = random_inputs(0, 1, 2, 256, 64, 128, dtype=dtype)
    run = functools.partial(
        mlstm_chunkwise, return_last_states=True, backend=backend, config=config
    )
    return compile_report.trace(results_of(run), *inputs.values(), device=H200)


def kernels_of(jaxpr):
    """(kernel, its products of tiles) for every launch."""
    return [
        (call, [*compile_report.equations(call.params["jaxpr"], "dot_general")])
        for call in compile_report.equations(jaxpr, "pallas_call")
    ]


def multiplies(name):
    """Whether the kernel of a stage multiplies matrices."""
    return name == "split_products" or (
        name not in HELPERS and costs.cost(name, Problem(1, 1, 64, 16, 16, 64, 1.0), 4).flops > 0
    )


def check_float32(call, dots, precision):
    """The products of a kernel have float32 operands and this precision."""
    for dot in dots:
        assert {x.aval.dtype for x in dot.invars} == {jnp.dtype("float32")}, call.params["name"]
        assert dot.params["precision"] == precision, call.params["name"]


@pytest.mark.slow
@BOTH
def test_every_product_in_a_kernel_is_six_products_of_bfloat16(case):
    """In the jaxpr and in the Triton IR; the kernels of the stages and the ones between them,
    forward and backward."""
    kernels = kernels_of(jaxpr_of(case))
    for call, dots in kernels:
        name = call.params["name"]
        assert bool(dots) == multiplies(name), name
        check_float32(call, dots, SIX_PRODUCTS)
        for dot in dots:
            assert dot.params["preferred_element_type"] == jnp.float32, name
        kernel = compile_report.lower(call)
        assert kernel.cause == "", name
        lines = [line for line in kernel.ir.splitlines() if "tt.dot " in line]
        assert len(lines) == 6 * len(dots), name
        for line in lines:
            assert (line.count("xbf16>"), line.count("xf32>")) == (2, 1), name
    names = {call.params["name"] for call, _ in kernels}
    assert "split_products" in names
    assert ("recurrent_fw_H" in names) == (case == "fused")


@pytest.mark.slow
@BOTH
def test_every_product_of_an_interpreted_kernel_is_in_float32(case):
    """CPUs have no split algorithms, and jaxlib 0.10 lacks some products of bfloat16."""
    for kernel in kernels_of(jaxpr_of(case, dtype="bfloat16", backend="interpret")):
        check_float32(*kernel, (Precision.HIGHEST, Precision.HIGHEST))


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_plain_stages_are_exact_to_float32(dtype, case):
    """The default of a GPU for float32 products is TF32."""
    products = compile_report.equations(jaxpr_of(case, dtype=dtype, backend="xla"), "dot_general")
    assert {x.params["precision"] for x in products} == {(Precision.HIGHEST, Precision.HIGHEST)}


@pytest.mark.slow
@BOTH
def test_no_product_runs_outside_of_kernels(case):
    jaxpr = jaxpr_of(case)
    in_kernels = {id(dot) for _, dots in kernels_of(jaxpr) for dot in dots}
    assert {*map(id, compile_report.equations(jaxpr, "dot_general"))} == in_kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [DotAlgorithmPreset.BF16_BF16_F32_X3, Precision.HIGHEST], ids=str
)
def test_another_precision_reaches_every_product(precision):
    for call, dots in kernels_of(jaxpr_of("materialised", precision)):
        expected = precision if precision in DotAlgorithmPreset else (precision, precision)
        assert {dot.params["precision"] for dot in dots} <= {expected}, call.params["name"]
