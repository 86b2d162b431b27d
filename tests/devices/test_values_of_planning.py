"""Plans of shards, tiles, and a config that a kernel cannot run: values that a hand can check."""

import dataclasses

import jax.numpy as jnp
from oracle import refused
from stage_calls import spec_of

from mlstm_pallas import KernelConfig
from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.formulas.tile_sizes import least_padding
from mlstm_pallas.planning.call_spec import launch_of, options_of
from mlstm_pallas.problem.dimensions import InputGate
from mlstm_pallas.problem.gpu import HOPPER, UNKNOWN
from mlstm_pallas.stages.lowering import Lowering

bfloat16 = jnp.dtype("bfloat16")


def spec(*shape, gpu=HOPPER, backend="triton", **options):
    return spec_of(shape, bfloat16, gpu, backend, **options)


def test_summaries_of_a_shard():
    """Summaries of a shard are of the splits of its forward pass, or of about 4096 steps each,
    as far as its chunks can be divided."""
    assert spec(1, 8, 8192, 256, 512).plan.num_splits == 4
    assert [spec(1, 8, S, 256, 512).plan.summary_splits for S in (8192, 8256, 4096)] == [4, 1, 4]
    assert [
        spec(1, 1, S, 64, 64).plan.summary_splits for S in (64, 4096, 8192, 32768, 49152, 65536)
    ] == [1, 1, 2, 8, 8, 16]
    fused = KernelConfig(fused=True, num_splits=4)
    x = spec(1, 8, 8320, 256, 512, chunk_size=128, config=fused).plan
    assert (
        x.uses_fused_scan,
        x.num_splits,
        x.fused_problem.L,
        x.spec.problem.NC,
        x.summary_splits,
    ) == (True, 4, 32, 65, 1)
    fused = KernelConfig(fused=True, num_splits=8)  # more than 260 chunks can be divided into
    assert spec(1, 8, 8320, 256, 512, chunk_size=128, config=fused).plan.num_splits == 4
    assert repr((x.by_chunk, x.fused_launch.lowering)) == "(False, <Lowering.TRITON: 'triton'>)"


def test_launches_of_the_fused_scan():
    """The fused scan has at most two launches, of up to 320 rows of the state each on Hopper,
    otherwise 256."""
    assert [
        spec(8, 8, 8192, DHQK, 512).plan.uses_fused_scan for DHQK in (512, 640, 656, 768, 1024)
    ] == [True, True, False, False, False]
    assert [
        spec(8, 8, 8192, DHQK, 512, gpu=UNKNOWN).plan.uses_fused_scan for DHQK in (512, 528)
    ] == [True, False]
    tiles = [
        spec(8, 8, 8192, DHQK, 512).plan.fused_launch.tiles for DHQK in (96, 320, 336, 448, 768)
    ]
    assert [x.state_rows for x in tiles] == [96, 320, 192, 256, 256]


def test_tiles_of_least_padding():
    """Tiles of Triton cover a head at the least cost: a block costs its columns and 32 more."""
    assert [
        least_padding(128, size) for size in (16, 48, 80, 96, 112, 128, 144, 192, 224, 320, 384)
    ] == [16, 64, 128, 128, 128, 128, 64, 64, 128, 128, 128]
    assert (
        least_padding(256, 640),
        least_padding(64, 96, 192, overhead=16),
        least_padding(64, 96, 96, overhead=16),
    ) == (128, 64, 32)
    assert least_padding(128, 16, 128) == 16


def test_forward_passes_and_shards():
    """A forward pass alone stores no states. A shard has heads of its own."""
    x = spec(1, 8, 8192, 256, 512, recompute_states_in_bw=False)
    assert x.forward_only == spec(1, 8, 8192, 256, 512)
    assert (
        repr(dataclasses.replace(x.with_heads(3, 5).problem, qk_scale=0))
        == "Problem(B=3, NH=5, S=8192, DHQK=256, DHV=512, L=256, qk_scale=0)"
    )
    assert (x.stabilised, spec(1, 8, 64, 16, 16, input_gate=InputGate.SIGMOID).stabilised) == (
        True,
        False,
    )
    assert (x.normaliser == Normaliser(), x.return_last_states, str(x.layout)) == (
        True,
        True,
        "BNTH",
    )
    assert [str(spec(1, 1, 64, 64, 64, backend=y).lowering) for y in (None, "triton", "xla")] == [
        "triton",
        "triton",
        "xla",
    ]


def test_what_a_call_asks_of_a_kernel():
    """What a call asks of a kernel."""
    x = spec(1, 8, 8192, 256, 512, recompute_states_in_bw=False)

    def options(spec, name):
        options = options_of(spec, name, Lowering.TRITON)
        return options.recurrences, options.has_vector, options.has_h, options.stores_states

    assert options(x, "recurrent_fw_C") == (1, True, False, True)
    assert options(x, "split_products") == (1, False, False, False)
    assert options(x, "chunk_gates") == (1, False, False, True)
    assert options(x, "recurrent_bw_dC") == (1, False, False, True)
    assert options(x.forward_only, "recurrent_bw_dC") == (2, False, False, True)


def test_a_field_that_a_kernel_does_not_have():
    """A field that a kernel does not have."""
    wrong = KernelConfig(triton_parallel_fw_P=dict(siz_b_LQ=16))
    refused(
        TypeError,
        (
            "config.triton_parallel_fw_P has siz_b_LQ, expected some of its fields "
            "siz_b_DHQK, num_warps"
        ),
        lambda: launch_of(spec(1, 1, 64, 64, 64, config=wrong), "parallel_fw_P", Lowering.TRITON),
    )
