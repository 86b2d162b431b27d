"""Every bad call says, in one sentence, which argument is wrong, what came and what was expected. A
plain import loads what it should."""

import inspect
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arguments import HOST, accepted, check_arguments, on_host, stage_arrays, trace
from oracle import (
    PUBLIC,
    assert_same_bits,
    refusal,
    refused,
    run_python,
    slow,
)

import mlstm_pallas
from mlstm_pallas import (
    Gpu,
    KernelConfig,
    export,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    plan,
    reference,
    use_backend,
    xlstm_jax,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.planning.options import CHECKS, Options

B, NH, S, DHQK, DHV = 2, 3, 40, 16, 24
TRAILING = (DHQK,), (DHQK,), (DHV,), (), ()


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(*lead):
    return dict(zip("qkvif", (array(*lead, *shape) for shape in TRAILING), strict=True))


def zeros(arrays):
    return {name: np.zeros(x.shape, x.dtype) for name, x in arrays.items()}


PLAIN, BTNH, TOKEN = inputs(B, NH, S), inputs(B, S, NH), inputs(B, NH)
STATES = array(B, NH, DHQK, DHV), array(B, NH, DHQK), array(B, NH)
ZERO_STATES = [*zeros(dict(enumerate(STATES))).values()]
IDS = dict(segment_ids=array(B, S, dtype="int32"))
SEGMENTS = dict(segment_lengths=array(B, 2, dtype="int32"), return_last_states=True)
OPTIONAL = IDS | dict(sequence_lengths=array(B, dtype="int32"))


def arrays_of(function, rows=B):
    """The inputs and states of a function by name; the states have so many rows."""
    first = TOKEN if function is mlstm_recurrent_step else PLAIN
    states = [array(rows, *x.shape[1:]) for x in STATES]
    names = inspect.signature(function).parameters
    return dict(zip(names, [*first.values(), *states], strict=False))


ARRAYS = arrays_of(mlstm_chunkwise)
INITIAL = dict(list(ARRAYS.items())[5:])
stablef = xlstm_jax.triton_stablef
SYSTEMS = [getattr(xlstm_jax, name) for name in xlstm_jax.__all__]
STAGES = [getattr(x, name) for x in SYSTEMS for name in x.__all__ if re.search("_[fb]w(_|$)", name)]
generate = stablef._mlstm_chunkwise_fwbw_generator
TILED = "config.triton_parallel_fw_H"
config = partial(partial, KernelConfig)  # a call of it


def tiles(**fields):
    """A call of KernelConfig with tiles of a kernel."""
    return config(fused=False, triton_parallel_fw_H=fields)


def entered(backend):
    with use_backend(backend):
        pass


def generator():
    yield


def all_of(function, arrays=(), without=()):
    """A call with all arguments of a function."""
    names = [x for x in inspect.signature(function).parameters if x not in without]
    return function, accepted(names, arrays), ""


TILES = "siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "num_warps", "num_stages", "keep_q"
OTHERS = "slots", "segment_lengths", "num_segments"  # not beside the arguments of a sequence
# Functions, all their arguments, and the prefix of names in messages.
CALLS = [
    *(
        all_of(x, arrays_of(x) | OPTIONAL, OTHERS)
        for x in (*PUBLIC, stablef.mlstm_chunkwise_triton_stablef)
    ),
    *(slow(all_of(x, stage_arrays(x))) for x in STAGES),
    *map(all_of, (plan, entered)),
    (lambda **x: generate(**x)(*zeros(PLAIN).values()), *all_of(generate)[1:]),
    (KernelConfig, accepted(("chunk_size", "precision", "fused", "num_splits")), "config."),
    (lambda **x: tiles(**x)(), accepted(TILES), f"{TILED}: "),
    (partial(export.export, jnp.sin, 1.0), accepted(("platform", "device_kind")), ""),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda x: getattr(x[0], "__name__", "export"))
def test_every_argument_is_refused_by_name_and_accepted_at_its_bounds(call):
    check_arguments(*call)


def stage(name, **changed):
    """A call of a documented function of stablef with changed arguments."""
    function = getattr(stablef, f"_mlstm_chunkwise{name}")
    return partial(trace, function, all_of(function, stage_arrays(function))[1] | changed)


MOST, SLOTS = 2**16 - 2, array(B, dtype="uint8")


POOLED = arrays_of(mlstm_recurrent_step, 5)


def pooled(**changed):
    """A step with slots and pools of five rows."""
    return partial(trace, mlstm_recurrent_step, POOLED | {"slots": SLOTS} | changed)


SWAPPED = (
    "{} has shape (2, 3, 40), expected (B, S, NH) = (2, 40, 3), as q has shape (2, 40, 3, 16): "
    "axes 1 and 2 are swapped, as the other layout has them"
)
AS_STATES = ": pass the three states as *states"
FACTS = dict(name="NVIDIA Foo", capability=90, sms=60, shared_bytes=2**16)
TENFOLD = "ten times the compute capability (89 for 8.9), or 0"
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'
WITHOUT_STATES = dict.fromkeys(INITIAL)
HALF_STATES = WITHOUT_STATES | dict(input_gate="sigmoid", n_initial=INITIAL["n_initial"])
ZEROS = partial(mlstm_chunkwise, **zeros(ARRAYS))
WIDE = partial(mlstm_chunkwise, **jax.tree.map(np.float64, zeros(ARRAYS)))
# The whole message, and the changed arguments of mlstm_chunkwise, or another call.
VALUE_ERRORS = [
    (SWAPPED.format("f"), BTNH | dict(layout="BTNH", f=PLAIN["f"])),
    (
        "k has shape (2, 1, 40, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), as q has "
        "shape (2, 3, 40, 16): repeat its heads, jnp.repeat(k, 3, axis=1)",
        dict(k=array(2, 1, 40, 16)),
    ),
    (
        "v has shape (2, 40, 2, 24), expected (B, S, NH, DHV) = (2, 40, 6, DHV), as q has "
        "shape (2, 40, 6, 16): repeat its heads, jnp.repeat(v, 3, axis=2)",
        {**dict.fromkeys("qk", array(2, 40, 6, 16)), "v": array(2, 40, 2, 24), "layout": "BTNH"},
    ),
    (
        "q has shape (2, 3, 0, 16), expected (B, NH, S, DHQK) = (2, 3, S, DHQK) with S >= 1",
        dict(q=array(2, 3, 0, 16)),
    ),
    (
        "v has shape (2, 3, 40, 0), expected (B, NH, S, DHV) = (2, 3, 40, DHV) with DHV >= 1",
        dict(v=array(2, 3, 40, 0)),
    ),
    (
        "n_initial is None, expected all initial states (c_initial, n_initial, m_initial) or none",
        dict(n_initial=None),
    ),
    ("c_initial is None, expected all initial states (c_initial, n_initial) or none", HALF_STATES),
    (
        "segment_lengths has shape (2, 40), expected (B, N) = (2, 2), as c_initial has shape (2, "
        "2, 3, 16, 24)",
        SEGMENTS
        | {name: array(B, 2, *x.shape[1:]) for name, x in INITIAL.items()}
        | dict(segment_lengths=array(B, S, dtype="int32")),
    ),
    (
        "num_segments is 2, expected segment_lengths in its place, which are (segment_ids[:, :, "
        "None] == jnp.arange(2)).sum(1) of ids that ascend",
        OPTIONAL | dict(num_segments=2, return_last_states=True),
    ),
    (
        "segment_lengths is passed with return_last_states=False, expected return_last_states=True",
        SEGMENTS | dict(return_last_states=False),
    ),
    *(
        (f"{name} is passed with segment_lengths, expected one of them", SEGMENTS | {name: value})
        for name, value in (OPTIONAL | dict(reverse=True)).items()
    ),
    (
        "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\"",
        dict(normalize=False),
    ),
    (
        "eps is an integer of 16610 bits, expected 0 or a number from 1.1754944e-38 to "
        "3.4028235e+38, the range of float32",
        dict(eps=10**5000),
    ),
    (
        "backend: a call was traced for the triton kernels, which are for NVIDIA GPUs, and is "
        "lowered for another device: expected backend 'xla' (plain jnp), or backend None and "
        "jax.default_device or jax.set_mesh of that device around the call",
        partial(ZEROS, backend="triton"),
    ),
    (
        "device_kind is None, expected the name of a known NVIDIA GPU, such as 'NVIDIA H200' "
        "or 'NVIDIA A100-SXM4-80GB', or of this process's; for an unknown one, that of a known "
        "GPU of its compute capability",
        partial(export.export, jnp.sin, 1.0, platform="cuda"),
    ),
    (
        "matQ has shape (1, 2, 64, 24), expected S = 64 to be 1 chunks of 16 steps",
        stage("__parallel_bw_dQKV", num_chunks=1),
    ),
    (
        "vecN_initial, scaM_initial are None, expected all initial states (matC_initial, "
        "vecN_initial, scaM_initial) or none",
        stage("_fw", vecN_initial=None, scaM_initial=None),
    ),
    (
        "c_initial is None with slots, expected a pool (P, NH, DHQK, DHV)",
        pooled(**WITHOUT_STATES),
    ),
    (
        "n_initial has shape (2, 3, 16), expected (P, NH, DHQK) = (5, 3, 16), as c_initial has "
        "shape (5, 3, 16, 24)",
        pooled(n_initial=STATES[1]),
    ),
    (
        "segment_lengths has 65535 documents per row, expected at most 65534, the limit of a "
        "kernel's grid, or backend 'xla'",
        SEGMENTS | dict(segment_lengths=array(B, MOST + 1, dtype="int32"), backend="triton"),
    ),
    (
        "phase is [0, 1], expected an integer from 0 to 2147483647 or an array (B,)",
        partial(mlstm_ring_states, *ZERO_STATES, dtype="float32", phase=[0, 1]),
    ),
    (
        "i has shape (2, 3, 40, 1), expected (B, NH, S) = (2, 3, 40), as q has shape (2, 3, 40, "
        "16): drop axis 3, i.squeeze(3)",
        dict(i=array(B, NH, S, 1)),
    ),
    (
        "q has shape (3, 40, 16), expected (B, NH, S, DHQK): add an axis for the batch, q[None], "
        "or map the call with jax.vmap; for one head, jnp.expand_dims(q, 1)",
        inputs(NH, S),
    ),
    (
        "sequence_lengths has shape (2, 40), expected (B,) = (2,), as q has shape (2, 3, 40, 16): "
        "a mask has the lengths np.sum(mask, axis=1)",
        dict(sequence_lengths=array(B, S, dtype="int32")),
    ),
    (
        "q has shape (1, 40, 1, 16, 1), expected (B, NH, S, DHQK): drop an axis of size 1",
        dict(q=array(1, S, 1, DHQK, 1)),
    ),
    (
        "c_initial has shape (2, 4, 3, 16, 24), expected (B, NH, DHQK, DHV) = (2, 3, 16, 24), as q "
        "has shape (2, 3, 40, 16)",
        dict(c_initial=array(B, 4, NH, DHQK, DHV)),
    ),
    (
        "k has shape (5, 1, 40, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), as q has shape "
        "(2, 3, 40, 16)",
        dict(k=array(5, 1, S, DHQK)),
    ),
    (
        "c_initial has shape (2, 3, 24, 16), expected (B, NH, DHQK, DHV) = (2, 3, 16, 24), as q "
        "has shape (2, 3, 40, 16): its last two axes are swapped, c_initial.mT",
        dict(c_initial=array(B, NH, DHV, DHQK)),
    ),
    *(
        (
            f"q has shape (2, {steps}, 3, 16), expected (B, NH, DHQK): {advice}",
            partial(mlstm_recurrent_step, **zeros(inputs(B, steps, NH))),
        )
        for steps, advice in (
            (1, "drop axis 1, q.squeeze(1)"),
            (2, "several steps are for mlstm_chunkwise or mlstm_ring_step"),
        )
    ),
    (
        "state_dtype is bfloat16 with return_last_states=False, expected return_last_states=True",
        dict(state_dtype="bfloat16"),
    ),
    (
        "chunk_size is 32 and config.chunk_size 64, expected one of them",
        dict(chunk_size=32, config=KernelConfig(chunk_size=64)),
    ),
    (
        "config.chunk_size is 64, expected at most every = 16",
        partial(
            mlstm_chunkwise_states, *PLAIN.values(), every=16, config=KernelConfig(chunk_size=64)
        ),
    ),
    *(
        (
            f"gpu.{field} is {x!r}, expected an integer >= {least}",
            partial(Gpu, **FACTS | {field: x}),
        )
        for field, x, least in (
            ("capability", 8.9, f"10, {TENFOLD}"),
            ("capability", True, f"10, {TENFOLD}"),
            ("capability", -1, f"10, {TENFOLD}"),
            ("sms", 0, "1"),
            ("shared_bytes", 227, "1024 bytes"),
            ("shared_bytes", "99", "1024 bytes"),
        )
    ),
]
TYPE_ERRORS = [
    ("vecN_out has type NoneType, expected an array", stage("_bw", vecN_out=None)),
    (
        "k has dtype bfloat16, expected float32, the dtype of q",
        dict(k=array(2, 3, 40, 16, dtype="bfloat16")),
    ),
    (
        f"autocast_kernel_dtype is float64, expected one of float32, bfloat16, float16{FLOAT64}",
        dict(autocast_kernel_dtype="float64", backend="xla"),
    ),
    (f"q has dtype float64, expected one of float32, bfloat16, float16{FLOAT64}", WIDE),
    (
        "eps is traced, expected a Python float: mark it static in jit",
        partial(jax.eval_shape, ZEROS, eps=0.5),
    ),
    *(
        (f"c{name} has type tuple, expected an array{AS_STATES}", call)
        for name, call in (
            ("_initial", partial(mlstm_chunkwise, *zeros(PLAIN).values(), STATES)),
            ("_initial", partial(mlstm_recurrent_step, *zeros(TOKEN).values(), STATES)),
            ("", partial(mlstm_ring_states, STATES, dtype="float32")),
        )
    ),
    *(
        (
            f"states has type {kind}, expected RingStates alone: mlstm_ring_states(c, n, m, "
            "dtype=q.dtype) makes them, and keeps the input gate",
            partial(mlstm_ring_step, *TOKEN.values(), *states),
        )
        for kind, states in (("ShapeDtypeStruct", STATES), ("tuple", [STATES]))
    ),
    (
        "states is the last positional argument, expected accepted=... behind it",
        lambda: mlstm_ring_step(*TOKEN.values(), mlstm_ring_states(*ZERO_STATES, dtype="f4"), 0),
    ),
    (
        "generator runs after its call has returned, expected a with statement inside of it",
        lambda: use_backend("xla")(generator),
    ),
    *(
        (
            f"{name} has type {type(x).__name__}, expected an array {dims} of integers, "
            "np.array([...])",
            partial(call, **{name: x}),
        )
        for name, x, dims, call in (
            ("sequence_lengths", [4, 4], "(B,)", ZEROS),
            ("segment_ids", 0, "(B, S)", ZEROS),
            ("slots", [0, 1], "(B,)", partial(mlstm_recurrent_step, *zeros(TOKEN).values())),
        )
    ),
    (
        "sequence_lengths has dtype bool, expected an integer dtype: a mask has the lengths "
        "np.sum(mask, axis=1)",
        dict(sequence_lengths=array(B, S, dtype="bool")),
    ),
    (
        "v has dtype >f4, expected the byte order of this machine: "
        "v.astype(v.dtype.newbyteorder('='))",
        partial(ZEROS, v=np.zeros(PLAIN["v"].shape, ">f4")),
    ),
    ("config.chunksize is no field, expected one like chunk_size", config(chunksize=64)),
    (f"{TILED}: num_warp is no field, expected one like num_warps, num_ctas", tiles(num_warp=4)),
    (
        f"{TILED} has block_k, expected some of its fields siz_b_LQ, siz_b_LKV, siz_b_DHQK, "
        "siz_b_DHHV, num_warps, num_stages, keep_q",
        dict(backend="interpret", config=tiles(block_k=16)()),
    ),
]


@pytest.mark.parametrize(
    ("kind", "message", "bad"),
    [refusal(ValueError, *x) for x in VALUE_ERRORS] + [refusal(TypeError, *x) for x in TYPE_ERRORS],
)
def test_bad_calls(kind, message, bad):
    call = bad if callable(bad) else partial(trace, mlstm_chunkwise, ARRAYS | bad)
    refused(kind, message, call)


LENGTHS, ROWS, DOCUMENTS = np.array([3, 41]), np.array([4, 4]), np.array([[20, 20], [30, 11]])
# What is said of wrong values, and by which function.
INDICES = [
    refusal(
        ValueError,
        "sequence_lengths[1] is 41, expected 0 to S = 40",
        (mlstm_chunkwise, dict(sequence_lengths=LENGTHS)),
    ),
    refusal(
        ValueError,
        "sequence_lengths[0] is -3, expected 0 to S = 40",
        (mlstm_chunkwise, dict(sequence_lengths=-LENGTHS)),
    ),
    refusal(
        ValueError,
        "segment_lengths[1, 1] is 11, expected 0 to S = 40, as all lengths of a row together",
        (mlstm_chunkwise, dict(segment_lengths=DOCUMENTS, return_last_states=True)),
    ),
    refusal(
        ValueError,
        "segment_lengths[0, 0] is -20, expected 0 to S = 40, as all lengths of a row together",
        (mlstm_chunkwise, dict(segment_lengths=-DOCUMENTS, return_last_states=True)),
    ),
    refusal(
        ValueError,
        "slots[1] is 4, expected -1 for none, or a row below P = 5 that no entry before it has",
        (mlstm_recurrent_step, dict(slots=ROWS)),
    ),
]


@pytest.mark.parametrize("values", ["numpy", "device", slow("traced")])
@pytest.mark.parametrize(("kind", "message", "call"), INDICES)
def test_wrong_indices_are_refused_with_their_place(monkeypatch, kind, message, call, values):
    """Reading arrays on a device would wait for them, so MLSTM_PALLAS_CHECKS asks for it."""
    function, bad = call
    x = zeros(arrays_of(function, 5 if "slots" in bad else B))
    arrays = {name: y for name, y in bad.items() if isinstance(y, np.ndarray)}
    run = partial(function, **x | {name: bad[name] for name in bad.keys() - arrays}, backend="xla")
    if values == "numpy":
        return refused(kind, message, run, **arrays)
    run = jax.jit(run) if values == "traced" else run
    monkeypatch.setenv("MLSTM_PALLAS_CHECKS", "1")
    with pytest.raises((kind, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(run(**jax.tree.map(jnp.asarray, arrays)))
    assert str(error.value).strip().splitlines()[-1].endswith(message)
    jax.effects_barrier()


@pytest.mark.parametrize("x", [2**40, -(2**31) - 1, np.uint64(2**63)], ids=str)
def test_numpy_integers_beyond_32_bits_are_refused_by_name(x):
    """JAX would read the lower 32 bits, 2**40 as 0."""
    states = mlstm_ring_states(*(np.zeros(x.shape, "float32") for x in STATES), dtype="float32")
    new = partial(mlstm_ring_states, *states[:3], dtype="float32")
    row = np.full((B,), x)
    step = partial(mlstm_recurrent_step, **zeros(arrays_of(mlstm_recurrent_step, 5)))
    sequences, flush = partial(mlstm_chunkwise, **zeros(PLAIN)), partial(mlstm_ring_flush, states)
    documents = partial(sequences, return_last_states=True)
    unique = "np.unique(segment_ids, return_inverse=True)[1] has the same segments"
    for name, (run, expected) in dict(
        segment_ids=(sequences, unique),
        segment_lengths=(documents, "0 to S"),
        sequence_lengths=(sequences, "0 to S"),
        slots=(step, "-1 for none, or a row of the pools"),
        accepted=(flush, "0 to the number of tokens of the call before"),
        phase=(new, "phase % length has the same phases"),
    ).items():
        bad = np.broadcast_to(row[:, None], (B, S)) if name.startswith("segment") else row
        message = f"{name} is an array of shape {bad.shape}, expected integers of 32 bits: "
        refused(ValueError, message + expected, run, **{name: bad})


@pytest.mark.slow
def test_slots_of_none_may_repeat():
    pooled(slots=np.array([-1, -1]))()


OF_CHUNKS = mlstm_chunkwise, mlstm_chunkwise_sequence_parallel, reference.chunkwise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "pooled"), [*((x, False) for x in PUBLIC), (mlstm_recurrent_step, True)]
)
def test_last_states_of_the_sigmoid_gate_are_taken_as_initial_ones(function, pooled):
    """m is among them: None, zeros or traced, when its values are unknown. It is 0 whatever a call
    of chunks gets. Other values are refused."""
    x, options = zeros(arrays_of(function, 5 if pooled else B)), dict(input_gate="sigmoid")
    _, _, v, *_, c, n, m = [*x][:8]
    if pooled:
        options["slots"] = np.array([4, 1])
    if function in OF_CHUNKS:
        options["return_last_states"] = True
    if function is mlstm_chunkwise_sequence_parallel:
        options["axis_name"] = "s"
    x |= {name: np.ones(x[name].shape, "float32") for name in (v, c, n)}

    def run(m_initial):
        call = partial(function, **x | {m: m_initial}, **options)
        mapped = jax.vmap(lambda _: call(), axis_name="s", axis_size=1)
        return mapped(jnp.zeros(1)) if "axis_name" in options else call()

    traced = np.full(x[m].shape, 3.0 if function in OF_CHUNKS else 0.0, "float32")
    given, without = jax.jit(lambda y: (run(y), run(None)))(traced)
    assert_same_bits(given, without)
    assert not np.any(without[1][2])
    jax.eval_shape(lambda: run(x[m]))  # an array of zeros
    message = f"{m} has values other than 0 with input_gate 'sigmoid', expected None or zeros"
    refused(ValueError, message, run, x[m] + 1)


@pytest.mark.slow
def test_documents_of_a_row_may_be_as_many_as_a_grid_has_places():
    """Plain jnp has no limit."""
    for states, N, backend in ({}, MOST, "triton"), (INITIAL, MOST + 1, "xla"):
        lengths = array(B, N, dtype="int32")
        options = dict(segment_lengths=lengths, return_last_states=True, backend=backend)
        trace(mlstm_chunkwise, PLAIN | states | options)


@pytest.mark.quick("recurrence")
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "function",
    [mlstm_chunkwise, reference.chunkwise, reference.recurrence],
    ids=lambda x: x.__name__,
)
def test_more_heads_than_steps_get_a_warning_at_each_line_that_names_no_layout(function):
    """There is no warning if states or segments tell the layout."""
    message = (
        'layout="BNTH", the default, reads q as (B, NH, S, DHQK) and finds S < NH, fewer steps '
        'than heads: pass layout="BTNH" if it is (B, S, NH, DHQK), else layout="BNTH"'
    )
    x = zeros(BTNH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            jax.eval_shape(lambda: function(**x))
        jax.eval_shape(lambda: function(**x))
    caught = [x for x in caught if x.category is UserWarning]
    assert [str(x.message) for x in caught] == [message] * 2
    few = inputs(B, NH, 1)
    trace(function, few | {"layout": "BNTH"})
    trace(function, inputs(B, NH, NH))  # as many steps as heads
    trace(function, inputs(B, 1, NH) | {"layout": "BTNH"})
    trace(function, arrays_of(function) | few)
    trace(mlstm_chunkwise, few | {"segment_ids": array(B, 1, dtype="int32")})


@pytest.mark.quick("chunkwise")
@pytest.mark.parametrize(
    "function",
    [
        mlstm_chunkwise,
        partial(mlstm_chunkwise_states, every=16),
        reference.chunkwise,
        reference.recurrence,
        partial(mlstm_chunkwise_sequence_parallel, axis_name="s"),
    ],
    ids=lambda x: getattr(x, "func", x).__name__,
)
def test_a_warning_is_at_the_line_of_the_caller_however_deep_in_the_package(function):
    file, scope = f"{mlstm_pallas.__path__[0]}/folder/file.py", {}
    exec(compile("def inside(call, **x): return call(**x)", file, "exec"), scope)
    x = zeros(BTNH)
    for depth in (0, 1, 7):  # functions of the package between the caller and the function
        call = function
        for _ in range(depth):
            call = partial(scope["inside"], call)

        def caller(_, call=call):
            return call(**x)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.eval_shape(jax.vmap(jax.jit(caller), axis_name="s"), array(1))
        line = caller.__code__.co_firstlineno + 1
        assert {(y.filename, y.lineno) for y in caught} == {(__file__, line)}
        assert [y.category for y in caught] == [UserWarning]


new_rings = partial(mlstm_ring_states, dtype="float32")
FRESH = jax.eval_shape(new_rings, *STATES)
COUNTS = array(B, dtype="int32")


def ring_of(x):
    """The arguments of a function of rings: fields of states have their prefix in the names."""
    fields = {name.partition(".")[2]: y for name, y in x.items() if "." in name}
    return {name: y for name, y in x.items() if "." not in name} | (
        dict(states=FRESH._replace(**fields)) if fields else {}
    )


RINGS = {f"states.{name}": x for name, x in FRESH._asdict().items()}
JOINED = dict(q=array(B, NH, 2 * DHQK + DHV), i=array(B, NH, 2), k=None, v=None, f=None)
# Functions whose arguments the table of arguments does not have, with their arrays.
OTHERS = {
    "states": (partial(mlstm_chunkwise_states, every=16), ARRAYS | OPTIONAL),
    "ring_states": (partial(new_rings, ZERO_STATES[0]), dict(n=STATES[1], m=STATES[2])),
    "ring_step": (mlstm_ring_step, TOKEN | RINGS | dict(accepted=COUNTS)),
    "ring_flush": (mlstm_ring_flush, RINGS | dict(accepted=COUNTS)),
    "step": (partial(mlstm_recurrent_step, **zeros(POOLED)), dict(slots=SLOTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_arrays_of_other_functions_are_refused_by_name(case):
    function, arrays = OTHERS[case]
    check_arguments(lambda **x: function(**ring_of(x)), arrays)


@pytest.mark.parametrize("x", [INITIAL, RINGS], ids=["step", "ring_step"])
@pytest.mark.parametrize("name", "qi")
def test_joined_arrays_in_host_memory_are_refused_by_name(name, x):
    """Traced or not."""
    x, step = JOINED | x, mlstm_ring_step if x is RINGS else mlstm_recurrent_step
    message = f"{name} {HOST.format(name)}jax.memory.Space.Device) moves it there"
    arrays = {y: z for y, z in x.items() if z is not None} | {name: on_host(x[name])}

    def run(arrays):
        return step(**ring_of(x | arrays))

    refused(ValueError, message, run, zeros(arrays) | {name: arrays[name]})
    refused(ValueError, message, jax.eval_shape, run, arrays)


SQUARE = zeros(inputs(1, 1, 16))
SQUARE["v"] = SQUARE["q"]  # the output of a layer is the input of the next


def layers(q):
    def layer(x, _):
        return mlstm_chunkwise(**SQUARE | {"q": x}, backend="xla"), None

    return jax.lax.scan(layer, q, None, length=2)[0]


def of_sequence(q):
    run = partial(mlstm_chunkwise_sequence_parallel, **SQUARE | {"q": q}, axis_name="s")
    return jax.vmap(lambda _: run(), axis_name="s", axis_size=1)(jnp.zeros(1))


FORWARD_MODE = [
    jax.jit(lambda q: jax.jvp(layers, (q,), (q,))),
    lambda q: jax.linearize(layers, q)[1](q),
    jax.hessian(layers),
    lambda q: jax.jvp(jax.checkpoint(layers), (q,), (q,)),
    lambda q: jax.jvp(of_sequence, (q,), (q,)),
]


@pytest.mark.slow
def test_second_derivatives_and_forward_mode_are_refused_by_name():
    message = (
        "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
        "forward mode use mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
    )
    second = jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(layers(q)))(q) ** 2))
    for derivative in second, *FORWARD_MODE:
        refused(TypeError, message, derivative, SQUARE["q"])


@pytest.mark.slow
def test_the_plain_function_takes_the_call_as_it_is():
    """With S no multiple of the chunk."""
    options = zeros(OPTIONAL) | dict(chunk_size=16, return_last_states=True, layout="BTNH")
    functions = reference.chunkwise, mlstm_chunkwise
    x, y = (jax.eval_shape(partial(z, **options), **BTNH | INITIAL) for z in functions)
    assert x == y


ATTRIBUTES = """
import mlstm_pallas
for name in ("distributed", "export", "reference", "xlstm_jax"):
    assert getattr(mlstm_pallas, name).__name__ == f"mlstm_pallas.{name}"
mlstm_pallas.xlstm_jax.triton_stablef.mlstm_chunkwise_triton_stablef
for module in (mlstm_pallas, mlstm_pallas.xlstm_jax):
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        getattr(module, name)
"""


@pytest.mark.slow
def test_modules_are_attributes_without_an_import_of_their_own():
    """Modules list all that they have."""
    run_python("-W", "error", "-c", ATTRIBUTES)
    for module in (mlstm_pallas, mlstm_pallas.xlstm_jax):
        message = f"module '{module.__name__}' has no attribute 'no_such_module'"
        refused(AttributeError, message, getattr, module, "no_such_module")


def test_every_option_has_a_check():
    assert CHECKS.keys() == vars(Options()).keys()
