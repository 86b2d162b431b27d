"""The Mosaic GPU kernels compiled for Hopper without a GPU: spills, messages, shared memory."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from unittest import mock

import compile_report
import jax
import pytest
from mosaic_gpu_cases import ALL, Recurrences, stages_on_mosaic_gpu
from oracle import HELPERS, needs_compiler, needs_mosaic_gpu, param

from mlstm_pallas import KernelConfig

pytestmark = [needs_mosaic_gpu, needs_compiler, pytest.mark.slow]
H200 = compile_report.DEVICES["H200"]
KERNELS = {}  # that a process has compiled, by equation


def compiled_once(call, relocatable, folder):
    """compile_report compiles the kernels that are new to this process."""
    equations = {str(x): x for x in compile_report.equations(call.traced(), "mpmd_map")}
    new = {name: x for name, x in equations.items() if name not in KERNELS}
    call = SimpleNamespace(traced=lambda: SimpleNamespace(eqns=[*new.values()]))
    kernels = compile_report._compile_mosaic_gpu(call, relocatable, folder)
    KERNELS.update(zip(new, kernels, strict=True))
    return [KERNELS[name] for name in equations]


@pytest.fixture(scope="module")
def compiled():
    """The kernels of calls, which one process compiles, so that jax is imported once."""
    variables = compile_report.PRINTING | dict(JAX_PLATFORMS="cpu")
    with contextlib.closing(compile_report.Worker(compiled_once, variables)) as compiler:
        shared = functools.partial(compiler)
        shared.close = lambda: None

        def worker(*_):
            return shared

        def kernels_of(calls):
            with mock.patch.object(compile_report, "Worker", worker):
                return compile_report.mosaic_gpu_kernels(Together(tuple(calls)), RELOCATABLE)

        yield kernels_of


def max_spill_bytes(stage, spec):
    """No spill is in a loop over steps, except for addresses of barriers in chunk_gradients.

    What is the same for all chunks, or is carried from chunk to chunk, may be in local memory once
    per chunk where it does not fit beside the accumulators: in that kernel, and in recurrent_fw_C
    with 128 rows, where a thread holds 64 elements of C, 64 of what the chunk adds and 32 of the
    sums for n. Where heads do not fill their tiles, ptxas of jax 0.12.0.1 needs 172 bytes in that
    kernel; in its code, as ptxas 12.8 and 13.5 write it, no step's products are beside a spill.
    """
    p = spec.problem
    if stage == "recurrent_fw_C" and spec.plan.forward[stage].tiles.state_rows == 128:
        return 148
    if stage == "chunk_gradients":
        return 172 if p.DHQK % 64 else 112
    return 64


# As the installed jax compiles, and relocatable as nvJitLink does, which jax takes from 0.12 on
# where it finds the library: see compile_report.
RELOCATABLE = [False] if jax.__version_info__ < (0, 12) else [False, True]


def check(kernel, usage, most_spilled):
    """It compiles, spills at most so many bytes and fits; no product waits for the one before
    (C7512), and no setmaxnreg is ignored (C7504).

    C7519 says that ptxas put a fence before a product.
    """
    assert kernel.cause == ""
    assert {*usage.messages} <= {"C7519"}, (kernel.name, usage)
    spilled = max(usage.spill_store_bytes, usage.spill_load_bytes)
    assert spilled <= most_spilled, (kernel.name, usage)
    assert usage.shared_bytes <= H200.shared_bytes


@dataclasses.dataclass(frozen=True)
class Together:
    """Calls whose kernels are compiled together: what they share is compiled once."""

    calls: tuple

    def traced(self):
        return SimpleNamespace(eqns=[x for call in self.calls for x in call.traced().eqns])


# Heads, dtype, variants: odd lengths, in the layout BTNH, have steps that are copied by groups of
# rows, which takes the most registers; materialised states come last. Heads of 128/128 and 256/256
# have the tiles of 128/256 and 256/512, in recurrent_bw_dC those of 64/128.
CALLS = [
    param((16, 16), "bfloat16", variants=["odd_materialised"]),
    param((64, 64), "bfloat16", variants=["odd"]),
    param((64, 128), "bfloat16", variants=["packed", "odd_materialised"]),
    param((128, 256), "bfloat16", variants=["odd", "odd_materialised"]),
    param((256, 512), "bfloat16", variants=["exp", "odd", "odd_materialised"]),
    param((256, 512), "float16", variants=["unnormalised"]),
    param((512, 512), "bfloat16", variants=["odd_materialised"]),
    # Rows of states that are no whole cache lines, to which jax 0.12 refuses plain stores.
    param((80, 160), "bfloat16", variants=["exp", "odd_materialised"]),
]


@pytest.mark.parametrize(("heads", "dtype", "options"), CALLS)
def test_the_kernels_compile_at_the_planned_tiles(heads, dtype, options, compiled):
    calls = [
        compile_report.Call(
            H200,
            *heads,
            dtype,
            seqlen=8191 if variant == "odd" else 8192,
            config=KernelConfig(fused=not schedule),
            direction="fwbw",
            variant="BTNH" if variant == "odd" else variant,
            backend="mosaic_gpu",
        )
        for variant, _, schedule in (x.partition("_") for x in options["variants"])
    ]
    specs, kernels = [call.spec() for call in calls], compiled(calls)
    stages = set.union(*map(stages_on_mosaic_gpu, specs))
    assert {kernel.name for kernel, *_ in kernels} - HELPERS == stages & ALL
    for kernel, usage in ((kernel, usage) for kernel, *usages in kernels for usage in usages):
        check(kernel, usage, max_spill_bytes(kernel.name, specs[-1]))
        assert 32 * kernel.num_warps * usage.registers <= 65_536, (kernel.name, usage.registers)
        multiplies = kernel.name not in {"chunk_gates", *HELPERS} - {"split_products"}
        assert (usage.wgmma > 0, usage.mma) == (multiplies, 0), kernel.name


RECURRENCES = [
    Recurrences((8, 8, 8192, 256, 512), L=256, rows=256, num_stages=4, layout="BTNH"),
    Recurrences((8, 8, 8192, 256, 512), L=256, rows=256, num_stages=4, alone=True),
    Recurrences((1, 8, 8192, 256, 512), L=256, rows=128, num_stages=6),
    Recurrences((8, 16, 8192, 128, 256), rows=128, num_stages=4, delta=True),
    Recurrences(
        (8, 16, 8192, 128, 256), rows=128, num_stages=4, delta=True, alone=True, layout="BTNH"
    ),
    Recurrences((8, 32, 8192, 64, 128), rows=64, num_stages=6, delta=True),
    Recurrences((1, 16, 8192, 128, 256), rows=64, num_stages=4, delta=True),
]


def test_weighted_recurrences_compile(compiled):
    """Scaled operands come from registers, of which there are enough, and products do not wait for
    each other."""
    kernels = compiled(RECURRENCES)
    assert len(kernels) == len(RECURRENCES)
    for kernel, usage in ((kernel, usage) for kernel, *usages in kernels for usage in usages):
        check(kernel, usage, 0)
        assert usage.wgmma > 0


def test_the_compile_report_has_both_kinds_of_kernels():
    def report(device, **options):
        return compile_report.report(
            device, [(128, 256)], ["bfloat16"], backend="mosaic_gpu", **options
        )

    [row] = report("H200", config=KernelConfig(fused=True), stages=["recurrent_fw_H"])
    assert row["note"] == ""
    assert row["config"].keys() == {"siz_b_DHHV", "state_rows", "num_stages"}
    assert row["chunk_size"] == 64
    assert row["num_warps"] == 8  # two warpgroups, which copy as well
    [cause] = {row["note"] for row in report("A100")}
    assert "expected a Hopper GPU" in cause
