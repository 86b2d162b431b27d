"""GPU interpret mode refuses what a running product still uses, where only a GPU would compute
wrong numbers, and what makes warpgroups wait for ever."""

import functools
import re
from pathlib import Path

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from mosaic_gpu_cases import CASES, RACE
from oracle import (
    cotangents_for,
    gradients_of_call,
    needs_mosaic_gpu,
    random_inputs,
    shown,
)

from mlstm_pallas.mosaic_gpu.common import copies, products
from mlstm_pallas.mosaic_gpu.common.copies import CopyRing, copy_in, copy_out, ring_barriers
from mlstm_pallas.mosaic_gpu.common.launch import (
    mosaic_call,
    plgpu,
    shared_tiles,
    tile_transforms,
)
from mlstm_pallas.problem.dimensions import Problem

pytestmark = [pytest.mark.usefixtures("interpreted"), needs_mosaic_gpu]

R, STEPS, SLOTS = 64, 5, 2
X = np.random.default_rng(0).normal(size=(STEPS * R, R)).astype(jnp.bfloat16)
X_TILES = X.astype("float32").reshape(STEPS, R, R)


def launch(kernel, name, x=X, *, y=((2, R, R), "float32"), warpgroups=1, **scratch):
    """y of kernel(x, y, **scratch), of this shape and dtype."""
    call = mosaic_call(
        kernel,
        name=name,
        grid={"program": 1},
        warpgroups=warpgroups,
        outputs={"y": jax.ShapeDtypeStruct(*y)},
        scratch=scratch,
    )
    return np.asarray(jax.jit(lambda x: call(x=x)["y"])(x))


def tiles(count):
    return plgpu.SMEM((count, R, R), jnp.bfloat16, transforms=tile_transforms(R, 2))


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def sum_of_squares(**defects):
    """The sum of x_j x_j by two warpgroups, of tiles in a ring; the first one has the defects:

    in_loop, after_loop: how many products may run on when a slot is released.
    unread, kept: the step for whose copies it does not wait, and the one that it does not release.
    last: the step that it releases at the end.
    """

    def kernel(x, y, left, right, barriers):
        def copy_tiles(step, copy):
            for tiles in (left, right):
                copy(x.at[pl.ds(step * R, R)], tiles)

        ring = CopyRing(barriers, STEPS, copy_tiles)

        def multiply(in_loop=1, after_loop=0, unread=None, kept=None, last=STEPS - 1):
            def add(accumulator):
                for j in map(np.int32, range(STEPS)):
                    slot = ring.slot(j) if j == unread else ring.wait(j)
                    products.add(accumulator, left.at[slot], right.at[slot])
                    products.wait(in_loop)
                    if j > 0 and j - 1 != kept:
                        ring.release(j - 1)
                    if j > 0:
                        ring.refill(j - 1)
                products.wait(after_loop)
                if kept != STEPS - 1:
                    ring.release(np.int32(last))

            y[lax.axis_index("wg")] = products.from_zeros(add, R, R)

        ring.prologue()
        for wg, options in enumerate((defects, {})):
            pl.when(lax.axis_index("wg") == wg)(functools.partial(multiply, **options))
        ring.epilogue()

    barriers = ring_barriers(SLOTS, copies=2)
    scratch = dict(left=tiles(SLOTS), right=tiles(SLOTS), barriers=barriers)
    for result in launch(kernel, "sum_of_squares", warpgroups=2, **scratch):
        assert_close(result, sum(tile @ tile for tile in X_TILES))


def two_squares(*, waits=True, second=0, pending=1):
    """x_0 x_0 and x_1 x_1.

    Args:
      waits: for the first product, before the second tile is written.
      second: where that is; the first tile is in slot 0.
      pending: how many products may run on when the first accumulator is read.
    """

    def kernel(x, y, tile):
        def both(*sums):
            for j, slot in enumerate((0, second)):
                if j and waits:
                    products.wait(0)
                products.store(tile.at[slot].T, x.at[pl.ds(j * R, R)][...])
                plgpu.commit_smem()
                products.add(sums[j], tile.T.at[:, :, slot], tile.at[slot].T)
            y[0] = products.read(sums[0], pending)

        y[1] = products.all_from_zeros(both, (R, R), (R, R))[2]

    y = launch(kernel, "two_squares", tile=tiles(2))
    for result, own in zip(y, X_TILES[:2], strict=True):
        assert_close(result, own @ own)


# jax 0.12 raises what is said of a race, 0.11 prints it.
STILL_READ = ", which a running product reads, expected wait before"
# A kernel, how it is wrong, and what is said of it.
DEFECTS = [
    # A product of one iteration, released in the next; no wait before a release, for a copy.
    (sum_of_squares, dict(in_loop=2), f"releases barriers.empty of left{STILL_READ}"),
    (sum_of_squares, dict(after_loop=1), f"releases barriers.empty of left{STILL_READ}"),
    (sum_of_squares, dict(unread=2), RACE),
    # No release; no last one; no last one of a slot that the other warpgroup fills; that of
    # another.
    (
        sum_of_squares,
        dict(kept=1),
        "acquires barriers.empty[1] again, expected release before",
    ),
    (
        sum_of_squares,
        dict(kept=4),
        "waits for barriers.empty[0], which it has itself, expected release before",
    ),
    (sum_of_squares, dict(kept=3), "ends with barriers.empty[1], expected release before"),
    (sum_of_squares, dict(last=3), "releases barriers.empty[1], expected acquire before"),
    # A tile that is written, and an accumulator that is read, too early.
    (two_squares, dict(waits=False), f"writes tile{STILL_READ}"),
    (
        two_squares,
        dict(waits=False, second=1, pending=2),
        "reads accumulator 1, to which a running product adds, expected wait before",
    ),
]


@pytest.mark.parametrize(
    ("kernel", "tiles_of_their_own"),
    [(sum_of_squares, {}), (two_squares, {}), (two_squares, dict(waits=False, second=1))],
)
def test_a_kernel_that_waits_is_right(kernel, tiles_of_their_own):
    kernel(**tiles_of_their_own)


@pytest.mark.timeout(45, method="thread")  # a signal does not end a kernel that waits
@pytest.mark.parametrize(
    ("kernel", "defects", "message"),
    DEFECTS,
    ids=[f"{kernel.__name__} {shown(defects)[5:-1]}" for kernel, defects, _ in DEFECTS],
)
def test_a_defect_is_refused(kernel, defects, message, capsys):
    """At once, although the other warpgroup waits for the one that has it."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        kernel(**defects)
    said = str(raised.value) + capsys.readouterr().out
    assert f"{kernel.__name__}: warpgroup 0 {message}" in said or message == RACE in said
    two_squares()  # the next launch is none the worse


def copied(tile, *, start=0, out=False):
    """Copies a tile of an array (320, 64) of bfloat16, from the start column on, in or out."""
    rows, columns = tile.shape

    def kernel(x, y, tile, full):
        array, start_ = (y if out else x), jnp.asarray(start, jnp.int32)
        part = array.at[pl.ds(0, rows), pl.ds(start_, columns)]
        if out:
            products.store(tile, jnp.ones(tile.shape, tile.dtype))
            plgpu.commit_smem()
            copy_out(tile, part)
            plgpu.wait_smem_to_gmem(0)
        else:
            copy_in(part, tile, full)
            plgpu.barrier_wait(full)

    launch(kernel, "copied", y=(X.shape, X.dtype), tile=tile, full=plgpu.Barrier(num_arrivals=1))


@pytest.mark.parametrize("out", [False, True])
def test_a_copy_that_begins_beyond_its_array_is_refused(out):
    """TMA has no index along an axis of which the array and the copy have one block."""
    tile = shared_tiles(64, 64, dtype=jnp.dtype("bfloat16"))
    copied(tile, out=out)
    message = "copied: warpgroup 0 copies a block at 64 of an axis of 64, expected it within"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        copied(tile, out=out, start=64)


def test_a_box_beyond_the_limits_of_tma_is_refused():
    with pytest.raises(ValueError, match=r"copied copies \(320, 16\) of \(320, 64\)"):
        copied(plgpu.SMEM((320, 16), jnp.bfloat16))


def test_arrays_that_share_memory_overwrite_each_other():
    def kernel(x, y, both, full):
        first, second = both
        for tile, source in ((first, x.at[:R]), (second, x.at[R : 2 * R])):
            copy_in(source, tile.at[0], full)
            plgpu.barrier_wait(full)
        y[0] = second[0].astype(jnp.float32)
        y[1] = first[0].astype(jnp.float32)

    barrier = plgpu.Barrier(num_arrivals=1)
    second, first = launch(kernel, "both", both=plgpu.RefUnion(tiles(1), tiles(1)), full=barrier)
    assert np.array_equal(second, X_TILES[1])
    assert np.isnan(first).all()


def test_steps_beyond_whole_groups_are_not_copied_at_once(monkeypatch):
    """An array of 100 steps has twelve whole groups of 8."""

    p = Problem(1, 1, 128, 2 * R, 2 * R, R, 1.0)

    def kernel(x, y, tile, full):
        copy_in(copies.head_of(x, 0, p).at[pl.ds(jnp.int32(R), R)], tile, full)
        plgpu.barrier_wait(full)
        y[...] = tile[...].astype(jnp.float32)

    def run():
        x = np.ones((1, 100, 2 * R), jnp.bfloat16)
        scratch = dict(tile=shared_tiles(R, 2 * R, dtype=x.dtype))
        scratch["full"] = plgpu.Barrier(num_arrivals=1)
        return launch(kernel, "odd", x, y=((R, 2 * R), "float32"), **scratch)

    assert run().sum() == (100 - R) * 2 * R
    monkeypatch.setattr(copies, "groups_alone", lambda *_: 0)
    message = "copies 64 of 100 steps from 64 on at once, expected pieces"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run()


def test_only_copies_py_starts_copies():
    """The interpreter checks those that ``copy_in`` and ``copy_out`` start."""
    files = Path(copies.__file__).parent.glob("*.py")
    started = {
        x.name for x in files if re.search(r"plgpu\.copy_\w+\(|\.async_copy\(", x.read_text())
    }
    assert started == {"copies.py", "inline_mlir.py"}


def test_what_guards_nothing_is_refused():
    def kernel(x, y, full, empty):
        plgpu.barrier_arrive(full)
        products.acquire(full, empty)
        products.release(empty)

    barriers = {name: plgpu.Barrier(num_arrivals=1, num_barriers=1) for name in ("full", "empty")}
    message = "releases empty, which guards no buffer, expected copy_in or guard before"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        launch(kernel, "guardless", **barriers)


def blocks_of(jaxpr):
    """The equations of a jaxpr, and those of each jaxpr inside."""
    yield jaxpr.eqns
    for inner in (x for eqn in jaxpr.eqns for x in compile_report.inner_jaxprs(eqn)):
        yield from blocks_of(inner)


@pytest.mark.parametrize("name", ["states_BTNH", "splits"])
def test_kernels_with_products_write_shared_memory_by_products_store(name):
    """What asks whether a product reads the tile, a callback, comes right before each write."""
    case = CASES[name]
    inputs = random_inputs(5, *case.shape, dtype=case.dtype)
    run = gradients_of_call(config=case.config, backend="mosaic_gpu")
    traced = jax.make_jaxpr(run)(inputs, cotangents_for(inputs, case.dtype)).jaxpr
    kernels = (x.params["jaxprs"][0] for x in compile_report.equations(traced, "mpmd_map"))
    before_writes = [
        before
        for kernel in kernels
        if any(compile_report.equations(kernel, "dot_general"))
        for eqns in blocks_of(kernel)
        for before, eqn in zip([None, *(x.primitive.name for x in eqns)], eqns, strict=False)
        if eqn.primitive.name in ("swap", "store") and eqn.invars[0].aval.memory_space == plgpu.SMEM
    ]
    assert len(before_writes) > 4
    assert {*before_writes} == {"io_callback"}
