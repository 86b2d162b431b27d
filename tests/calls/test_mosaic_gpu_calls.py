"""mlstm_chunkwise on Mosaic GPU: interpreted against float64; which stages run there; where it is
refused."""

import functools
import re
import warnings

import jax
import jax.extend.core
import plans
import pytest
from engine import PROMISED, Ids
from mosaic_gpu_cases import (
    ALL,
    CASES,
    FUSED_STAGES,
    PAIRS,
    RACE,
    check_case,
    fused,
    materialised,
    mosaic_stages,
    of_scan,
    of_states,
)
from mosaic_gpu_interpreter import interpreted_mosaic_gpu
from oracle import (
    MOSAIC_CALL,
    OUTPUTS,
    call_shapes,
    compare,
    for_device,
    lowered_for_cuda,
    mesh_for,
    mesh_of,
    needs_mosaic_gpu,
    param,
    random_inputs,
    refused,
    results_of,
    slow,
    tolerance,
)
from relations import by_overflow
from stage_calls import tiles_class
from table import BF, F16, chunkwise, packed
from test_distributed import h_over
from test_stages import roundings

from mlstm_pallas import KernelConfig, mlstm_chunkwise, mlstm_recurrent_step, use_backend
from mlstm_pallas.export import CUSTOM_CALL_TARGET
from mlstm_pallas.xlstm_jax import triton_stablef

QUICK = ("states_BTNH",)
# Interpreted, each feature comes once. Each pair, and the states of packed prompts, come on a GPU;
# test_mosaic_gpu_stages.py has the stages of all rows.
SLOW = (
    *("one_block_of_rows_stored_float16", "reverse_lengths_of_one_block"),
    "reverse_heads_of_96_in_splits_stored_lengths_packed_BTNH",
    "reverse_materialised_in_splits_stored_lengths_packed_BTNH",
    "padded_in_splits_and_two_launches",
)


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW)])
def test_interpreted_kernels_against_float64(name, capsys):
    check_case((CASES | PAIRS)[name])
    assert RACE not in capsys.readouterr().out


@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "documents", "options"),
    [
        (192, packed((67, 59, 40), own=True), dict(BF, last=True, config=of_states(None, 64))),
        (192, packed((67, 59, 40), own=True), dict(BF, last=True, config=of_scan(None, 64))),
        (256, Ids(((67, 100, 89),)), dict(F16, config=of_scan())),
    ],
    ids=["materialised", "fused", "float16"],
)
def test_what_overflows_stays_in_its_segments(S, documents, options):
    by_overflow(chunkwise(S, "c", documents, NH=1, **options), "mosaic_gpu")


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "target"),
    [
        ("NVIDIA H200", "bfloat16", MOSAIC_CALL),
        ("NVIDIA H200", "float32", CUSTOM_CALL_TARGET),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", CUSTOM_CALL_TARGET),
    ],
)
def test_the_fastest_backend_follows_the_gpu_the_dtype_and_the_platform(kind, dtype, target):
    call = jax.jit(functools.partial(mlstm_chunkwise, backend="fastest", config=fused()))
    x = call_shapes(1, 2, 256, 64, 128, dtype)
    with for_device(kind):
        text = call.trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert {y for y in (MOSAIC_CALL, CUSTOM_CALL_TARGET) if y in text} == {target}
    cpu = call.lower(*x).as_text()
    assert "custom_call @" not in cpu


SMALL = dict(config=fused(), backend="mosaic_gpu")


def small_inputs():
    return list(random_inputs(6, 1, 2, 128, 64, 128, dtype="bfloat16", states=False).values())


@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_sequence_parallelism_on_one_device():
    """The device's summaries are not read, and the scan starts from a state that is given."""
    x = small_inputs()
    run = h_over(mesh_of((1,), names="s"), check_vma=False, **SMALL)
    exact = results_of(functools.partial(mlstm_chunkwise, backend="xla"))
    expected = exact(*(y.astype("float32") for y in x))
    compare("hqkvif", results_of(run)(*x), expected, PROMISED["bfloat16"][1])


@pytest.mark.slow
@needs_mosaic_gpu
def test_shard_map_lowers():
    """Outputs and what is inside the kernels say over which mesh axes they vary."""
    mesh = mesh_for("NVIDIA H200", (2,), "s")
    run = results_of(h_over(mesh, config=fused(), backend="mosaic_gpu"))
    text = lowered_for_cuda(run, *call_shapes(1, 1, 512, 256, 256), mesh=mesh)
    assert text.count(MOSAIC_CALL) >= len(FUSED_STAGES) + 1


@pytest.mark.slow
@needs_mosaic_gpu
def test_programs_share_their_kernels_with_jax_0_12():
    """jaxlib keeps compiled kernels by these hashes, which nothing around a call may change.

    jax 0.11 numbers the kernels of a process, and no two are equal.
    """

    def hashes(call):
        text = lowered_for_cuda(jax.jit(call), *call_shapes(1, 2, 512, 128, 256))
        return re.findall(r'kernel_hash = "(.*?)", ', text)

    run = functools.partial(mlstm_chunkwise, backend="mosaic_gpu")
    first = hashes(run)
    assert len({*first}) == len(first) > 2
    second = hashes(lambda *x: 2 * jax.named_scope("layer")(run)(*x))
    assert len(second) == len(first)
    both_have = len(first) if jax.__version_info__ >= (0, 12) else 0
    assert len({*first} & {*second}) == both_have


@pytest.mark.slow
@needs_mosaic_gpu
def test_reverse_flips_nothing():
    options = dict(backend="mosaic_gpu", reverse=True, return_last_states=True)
    run = results_of(functools.partial(mlstm_chunkwise, **options))
    text = lowered_for_cuda(run, *call_shapes(1, 2, 512, 128, 256))
    assert MOSAIC_CALL in text
    assert "stablehlo.reverse" not in text


HALF = call_shapes(1, 1, 128, 256, 256)


def a_step(*x, **options):
    return mlstm_recurrent_step(*(y[:, :, 0] for y in x), **options)


def adapter(*x, backend):
    with use_backend(backend):
        return triton_stablef.mlstm_chunkwise_triton_stablef(*x)


JAX = "expected jax >= 0.11.2 and < 0.13, which needs Python >= 3.12"
HOPPER = "expected a Hopper GPU (H100, H200, H800, H20, GH200)"
A100, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


# Versions of jax, GPUs and messages.
REFUSED = [
    ("0.11.1", "NVIDIA H200", f"jax is 0.11.1, {JAX}, or backend None"),
    ("0.13.0", A100, f"jax is 0.13.0, {JAX}, or backend None"),
    ("0.11.2", A100, f"the GPU is {A100}, {HOPPER} or backend None"),
    ("0.12.9", B200, f"the GPU is {B200}, {HOPPER} or backend None"),
]


@pytest.mark.parametrize(("jax_version", "gpu", "message"), REFUSED)
def test_another_jax_or_gpu_is_refused(jax_version, gpu, message, monkeypatch):
    """A step is not refused, because it has no Mosaic GPU kernel."""
    backend = "mosaic_gpu"
    monkeypatch.setattr(jax, "__version_info__", (*map(int, jax_version.split(".")),))
    monkeypatch.setattr(jax, "__version__", jax_version)
    with for_device(gpu):
        for run, name in (mlstm_chunkwise, "backend"), (adapter, "backend of use_backend"):
            call, text = functools.partial(run, backend=backend), f"{name} is '{backend}' and "
            refused(ValueError, text + message, jax.eval_shape, call, *HALF)
        step = functools.partial(a_step, backend=backend)
        assert jax.eval_shape(step, *HALF)[0].shape == (1, 1, 256)


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.filterwarnings("ignore:backend of use_backend is 'mosaic_gpu' and products are in")
@pytest.mark.parametrize("run", [mlstm_chunkwise, a_step, adapter])
def test_a_cpu_is_refused_when_lowered(run):
    message = "^backend: a call was traced for the mosaic_gpu kernels, which are for NVIDIA GPUs,"
    with pytest.raises(ValueError, match=message):
        jax.jit(functools.partial(run, backend="mosaic_gpu")).lower(*HALF)


@needs_mosaic_gpu
def test_a_step_runs_its_triton_kernel():
    x = small_inputs()
    with interpreted_mosaic_gpu():
        both = [a_step(*x, backend=backend) for backend in ("mosaic_gpu", "interpret")]
    compare(OUTPUTS, *map(jax.tree.leaves, both), tolerance("bfloat16", 64))
    text = lowered_for_cuda(jax.jit(functools.partial(a_step, backend="mosaic_gpu")), *HALF)
    assert (MOSAIC_CALL in text, CUSTOM_CALL_TARGET in text) == (False, True)


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("heads", "config"), [((128, 128), fused()), ((64, 64), materialised(2))])
def test_gradients_trace_in_strict_modes(heads, config):
    run = functools.partial(
        mlstm_chunkwise, backend="mosaic_gpu", config=config, recompute_states_in_bw=True
    )
    x = call_shapes(1, 2, 256, *heads)
    with jax.enable_x64(True):
        assert [*jax.eval_shape(results_of(run), *x)] == [x[2], *x]


@pytest.mark.slow
@needs_mosaic_gpu
def test_gradients_lower_without_jit():
    """As test_gpu_sanitizer.py runs them. Loops are traced all the same, because constant indices
    cannot be lowered."""
    run, x = functools.partial(mlstm_chunkwise, backend="mosaic_gpu"), small_inputs()
    with for_device("NVIDIA H200"), jax.disable_jit():
        traced = jax.make_jaxpr(results_of(run))(*x)
    assert MOSAIC_CALL in lowered_for_cuda(jax.jit(jax.extend.core.jaxpr_as_fun(traced)), *x)


@pytest.mark.slow
@needs_mosaic_gpu
def test_what_mosaic_gpu_kernels_round():
    gates, sums = "chunk_summaries ff 0, chunk_gates fffffffff 0, ", "step_sums f 0, "
    sums += "vector_states ff 0, "
    scan, states = "parallel_fw_P hff 1, recurrent_fw_H h 4, ", "recurrent_fw_C hff 6, "
    states += "parallel_fw_H hf 5, "
    dP, dC = "parallel_bw_dP hhffff 8, ", "recurrent_bw_dC hh 6, "
    last = "parallel_bw_dQKV hfhfhf 4, m_summaries ff 0, step_gradients fff 0, XLA 1"
    tiles = dict(state_rows=128)
    fused_plan = roundings("mosaic_gpu", fused=True, mosaic_gpu_recurrent_fw_H=tiles)
    assert fused_plan == gates + sums + scan + dP + dC + last
    assert roundings("mosaic_gpu", fused=False) == gates + states + dP + dC + sums + last


@needs_mosaic_gpu
def test_the_filters_of_the_caller_decide_about_the_deprecation_of_triton():
    run = jax.jit(functools.partial(mlstm_chunkwise, chunk_size=64))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        lowered_for_cuda(run, *HALF)
        assert warnings.filters == before
    assert {"Triton backend is deprecated" in str(x.message) for x in said} == {True}


def launch(stage, sizes, tiles):
    """The launch of a stage for B, NH, S, DHQK, DHV, in chunks of as many steps as the heads have
    rows."""
    config = {"chunk_size": sizes[3], f"mosaic_gpu_{stage}": tiles}
    return plans.launch_lines(stage, sizes, "NVIDIA H200", backend="mosaic_gpu", **config)


# Stage, B-NH-S-DHQK-DHV, tiles.
TILES = [
    # An item waits for three steps at once.
    param("parallel_bw_dQKV", (8, 8, 8192, 256, 512), num_stages=2),
    # A step holds v, dC, C and dh at once.
    param("chunk_gradients", (8, 16, 8192, 128, 256), num_stages=3),
    # A stage is free when the next one's product runs.
    param("recurrent_bw_dC", (8, 8, 8192, 256, 512), num_stages=1),
    # of 32 chunks
    param("recurrent_bw_dC", (8, 8, 8192, 256, 512), num_splits=64),
    # Each warpgroup has 64 rows of x.
    param("recurrent_fw_C", (8, 16, 8192, 128, 192), state_rows=128, state_columns=192),
    # One step beyond what registers, or a copy of up to 256 elements, allow; memory would do.
    param("parallel_bw_dQKV", (8, 8, 8192, 256, 512), siz_b_DHHV=288, num_stages=3),
    param("parallel_fw_H", (1, 8, 2048, 64, 576), siz_b_DHHV=288, num_stages=1),
    param("parallel_fw_H", (1, 8, 2048, 64, 576), siz_b_LQ=32),
    param("recurrent_fw_C", (8, 8, 8192, 256, 512), state_rows=320, state_columns=64, num_stages=2),
    param("vector_states", (8, 8, 8192, 256, 512), num_splits=64),
    # too few registers
    param("recurrent_fw_H", (8, 8, 8192, 256, 512), siz_b_DHHV=256),
    # It computes delta of h.
    param(
        "recurrent_bw_dC", (8, 16, 8192, 128, 256), state_rows=128, state_columns=128, num_stages=5
    ),
]


@needs_mosaic_gpu
@pytest.mark.parametrize(("stage", "sizes", "tiles"), TILES)
def test_tiles_that_a_kernel_cannot_have_are_refused(stage, sizes, tiles):
    *_, DHQK, DHV = sizes
    message = f"config.mosaic_gpu_{stage} is {tiles}, expected tiles that the kernel has for heads "
    class_name = tiles_class(stage, "mosaic_gpu").__name__
    message += f"of {DHQK}/{DHV} in chunks of {DHQK} steps, such as {class_name}("
    with pytest.raises(ValueError, match=re.escape(message)):
        launch(stage, sizes, tiles)


@needs_mosaic_gpu
def test_recurrences_of_heads_beyond_the_grid_run_on_triton():
    always = {"chunk_gates", "parallel_fw_H"} | FUSED_STAGES
    recurrences = {"recurrent_fw_C", "recurrent_bw_dC"}

    def stages(NH, S, **config):
        """Those with the fused scan and with materialised states, but for the gradients."""
        both = (
            mosaic_stages(1, NH, S, 64, 128, config=KernelConfig(fused=x, **config))
            for x in (True, False)
        )
        return set.union(*both) & ALL - {"parallel_bw_dP", "parallel_bw_dQKV", "chunk_gradients"}

    assert stages(32_767, 64) == always | recurrences
    assert stages(32_768, 64) == stages(65_536, 64) == always
    assert "recurrent_fw_H" in stages(32_767, 8192, num_splits=4)
