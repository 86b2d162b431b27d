"""GPU interpret mode refuses what a running product still uses, where only a GPU would compute
wrong numbers, and what makes warpgroups wait for ever."""

import contextlib
import functools
import itertools
import re
from pathlib import Path
from unittest import mock

import compile_report
import engine
import jax
import jax.numpy as jnp
import mosaic_gpu_interpreter
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from mosaic_gpu_cases import CASES, RACE
from oracle import (
    needs_mosaic_gpu,
    shown,
)
from stage_calls import Problem

from mlstm_pallas.mosaic_gpu.common import copies, products
from mlstm_pallas.mosaic_gpu.common.copies import CopyRing, copy_in, copy_out, ring_barriers
from mlstm_pallas.mosaic_gpu.common.launch import (
    anywhere,
    mosaic_call,
    plgpu,
    shared_tiles,
    tile_transforms,
)

pytestmark = [pytest.mark.usefixtures("interpreted"), needs_mosaic_gpu]

R, STEPS, SLOTS = 64, 5, 2
X = np.random.default_rng(0).normal(size=(STEPS * R, R)).astype(jnp.bfloat16)
X_TILES = X.astype("float32").reshape(STEPS, R, R)


def program(kernel, name, *, y=((2, R, R), "float32"), warpgroups=1, **scratch):
    """A function that returns y of kernel(x, y, **scratch), of this shape and dtype."""
    call = mosaic_call(
        kernel,
        name=name,
        grid={"program": 1},
        warpgroups=warpgroups,
        outputs={"y": jax.ShapeDtypeStruct(*y)},
        scratch=scratch,
    )
    return jax.jit(lambda x: call(x=x)["y"])


def launch(kernel, name, x=X, **options):
    return np.asarray(program(kernel, name, **options)(x))


def tiles(count):
    return plgpu.SMEM((count, R, R), jnp.bfloat16, transforms=tile_transforms(R, 2))


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def sum_of_squares(**defects):
    """The sum of x_j x_j by two warpgroups, of tiles in a ring; the first one has the defects:

    in_loop: how many products may run on when a slot is released.
    unread: the step for whose copies it does not wait.
    """

    def kernel(x, y, left, right, barriers):
        def copy_tiles(step, copy):
            for tiles in (left, right):
                copy(x.at[pl.ds(step * R, R)], tiles)

        ring = CopyRing(barriers, STEPS, copy_tiles)

        def multiply(in_loop=1, unread=None):
            def add(accumulator):
                for j in map(np.int32, range(STEPS)):
                    slot = ring.slot(j) if j == unread else ring.wait(j)
                    products.add(accumulator, left.at[slot], right.at[slot])
                    products.wait(in_loop)
                    if j > 0:
                        ring.release(j - 1)
                        ring.refill(j - 1)
                products.wait(0)
                ring.release(np.int32(STEPS - 1))

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


def in_turn(steps):
    """x_0 x_0 for each "add", by a warpgroup that does the steps in turn, each with a slot of a
    ring: it copies or stores x_0 there, adds the square, and so on.

    The ring shares its memory with other tiles and with scratch of sums. A single barrier guards
    slot 1 if slot 0 is not copied to.
    """
    num_barriers = 1 if steps.startswith("copy1") else SLOTS

    def kernel(x, y, shared, full, empty):
        ring, others, sums = shared
        tile, zeros = x.at[:R], jnp.zeros((R, R))

        def run(accumulator):
            operations = dict(
                copy=lambda n: copy_in(tile, ring.at[n], full.at[min(n, num_barriers - 1)]),
                store=lambda n: products.store(ring.at[n], tile[...]),
                arrive=lambda n: plgpu.barrier_arrive(full.at[n]),
                acquire=lambda n: products.acquire(full.at[n], empty.at[n]),
                add=lambda n: products.add(accumulator, ring.at[n], ring.at[n]),
                wait=products.wait,
                release=lambda n: products.release(empty.at[n]),
                wait_empty=lambda n: products.wait_empty(empty.at[n]),
                copy_other=lambda n: copy_in(tile, others.at[n], full.at[n]),
                store_other=lambda n: products.store(others.at[n], zeros.astype(ring.dtype)),
                sum=lambda n: products.sum_over_rows(zeros, sums.at[n]),
            )
            for step in steps.split():
                operations[step[:-1]](np.int32(step[-1]))
                plgpu.commit_smem()

        y[0] = products.from_zeros(run, R, R)

    sums = plgpu.SMEM((SLOTS, products.SUM_SCRATCH), jnp.float32)
    barriers = plgpu.Barrier(num_arrivals=1, num_barriers=num_barriers)
    shared = plgpu.RefUnion(tiles(SLOTS), tiles(SLOTS), sums)
    y = launch(kernel, "in_turn", shared=shared, full=barriers, empty=barriers)
    assert_close(y[0], steps.count("add") * (X_TILES[0] @ X_TILES[0]))


def copied(tile, index=(), *, shape=(320, 64), atom=None, out=False, where=None):
    """Copies a tile of bfloat16 with such swizzle atoms from a part of an array, or out to it.

    index: the part; axes are a number, or a start and a size.
    """

    def kernel(x, y, tile, full):
        parts = (anywhere(*part) if isinstance(part, tuple) else part for part in index)
        part = (y if out else x).at[(*parts, ...)]
        if out:
            products.store(tile, jnp.ones(tile.shape, tile.dtype))
            plgpu.commit_smem()
            copy_out(tile, part, where)
            plgpu.wait_smem_to_gmem(0)
        else:
            copy_in(part, tile, full)
            plgpu.barrier_wait(full)

    x = np.ones(shape, jnp.bfloat16)
    scratch = dict(full=plgpu.Barrier(num_arrivals=1))
    scratch["tile"] = plgpu.SMEM(
        tile, x.dtype, transforms=[plgpu.TilingTransform(atom)] * bool(atom)
    )
    launch(kernel, "copied", x, y=(shape, x.dtype), **scratch)


def steps_copied(start, *, columns=2 * R, pieces=None, size=16, out=False):
    """Copies 16 of 100 steps, which are twelve groups of 8 and a half, in or out.

    pieces: how many are copied one by one, if not as many as the package says.
    size: how many steps are copied out, if not all.
    """
    p, rows = Problem(1, 1, 128, columns, columns, R, 1.0), 16

    def kernel(x, y, tile, full):
        steps = copies.head_of(y if out else x, 0, p).at[pl.ds(jnp.int32(start), rows)]
        if out:
            products.store(tile, jnp.ones(tile.shape, tile.dtype))
            plgpu.commit_smem()
            copy_out(tile, steps, size=None if size == rows else jnp.int32(size))
            plgpu.wait_smem_to_gmem(0)
        else:
            copy_in(steps, tile, full)
            plgpu.barrier_wait(full)
            y[0, :rows] = tile[...]

    x = np.ones((1, 100, columns), jnp.bfloat16)
    scratch = dict(tile=shared_tiles(rows, columns, dtype=x.dtype), full=plgpu.Barrier())
    with contextlib.ExitStack() as stack:
        if pieces is not None:
            of_tile = mock.patch.object(copies.StepsReference, "pieces", return_value=pieces)
            stack.enter_context(of_tile)
        y = launch(kernel, "steps_copied", x, y=(x.shape, x.dtype), **scratch)
    copied = min(size, 100 - start)
    assert np.all(y[0, start if out else 0 :][:copied] == 1)
    assert np.sum(y == 1) == copied * columns


HAS_IT = ", which it has itself, expected release before"
# jax 0.12 raises what is said of a race, 0.11 prints it.
STILL_READ = ", which a running product reads, expected wait before"
RELEASED, SHARED = f"releases empty of shared.0{STILL_READ}", f"overwrites shared.0{STILL_READ}"
READ, BOTH = "copy0 acquire0 add0 wait0 release0", "copy0 copy1 acquire0 acquire1 add0 add1"
AGAIN = f"{READ} wait_empty0"
# Steps of in_turn that are wrong, and what is said of them.
IN_TURN = [
    ("copy0 acquire0 add0 release0", RELEASED),
    (f"{BOTH} wait1 release1", RELEASED),
    # There are not as many.
    (f"{BOTH} wait3 release0", RELEASED),
    ("copy0 acquire0", "ends with empty[0], expected release before"),
    (f"{READ} release0", "releases empty[0], expected acquire before"),
    ("copy0 acquire0 copy0 acquire0", f"acquires empty[0]{HAS_IT}"),
    ("copy0 acquire0 wait_empty0", f"waits for empty[0]{HAS_IT}"),
    (
        "arrive0 acquire0 release0",
        "releases empty, which guards no buffer, expected copy_in or guard before",
    ),
    # The slot that is read, not the one behind it.
    ("store0 add0 store_other1 store_other0", SHARED),
    ("store0 add0 copy_other0", SHARED),
    ("store0 add0 sum0", SHARED),
    # Another copy than the one that is waited for, on another thread of the interpreter.
    ("copy0 copy1 acquire1 add0 wait0 release0", RACE),
    # A single barrier guards all slots.
    ("copy1 acquire0 add1 release0", RELEASED),
]
AT_ONCE = "copies 16 of 100 steps from {} on at once, expected pieces"
ONE_ATOM = dict(start=88, out=True, columns=R, size=5)
SIX_AXES = 2, 2, 2, 2, 2, 8
TILE = dict(tile=(64, 64), atom=(8, 64))
OF_64 = "copies a block at {} of an axis of 64, expected it within"
# A kernel, arguments with which it is wrong, and what is said of it then.
CHECKS = [
    # A product of one iteration, released in the next; no release for a copy that follows.
    (sum_of_squares, dict(in_loop=2), f"releases barriers.empty of left{STILL_READ}"),
    (sum_of_squares, dict(unread=2), RACE),
    # A tile that is written, and an accumulator that is read, too early.
    (two_squares, dict(waits=False), f"writes tile{STILL_READ}"),
    (
        two_squares,
        dict(waits=False, second=1, pending=3),
        "reads accumulator 1, to which a running product adds, expected wait before",
    ),
    *((in_turn, dict(steps=x), message) for x, message in IN_TURN),
    (steps_copied, dict(start=88, pieces=0), AT_ONCE.format(88)),
    (steps_copied, dict(start=4, pieces=0), AT_ONCE.format(4)),
    (steps_copied, dict(start=88, out=True, pieces=1), "copies 8 steps, expected 16 steps"),
    (steps_copied, ONE_ATOM | dict(pieces=4), "copies 4 steps, expected 5 steps"),
    # TMA has no index along an axis of which the array and the copy have one block.
    (copied, TILE | dict(index=((0, 64), (64, 64))), OF_64.format(64)),
    (copied, TILE | dict(index=((0, 64), (-64, 64)), out=True), OF_64.format(-64)),
    *(
        (copied, dict(tile=x, shape=x, atom=atom), f"{blocks}, expected {expected}")
        for x, atom, blocks, expected in (
            (SIX_AXES, None, f"copies {SIX_AXES} of {SIX_AXES} in blocks of ()", "five axes or"),
            ((257, 8), None, "of (257, 8) in blocks of ()", "256 blocks or fewer along each axis"),
            ((8, 512), (8, 512), "in blocks of (8, 512)", "blocks of 256 elements or fewer along"),
            ((8, 20), None, "copies (8, 20) of (8, 20) in blocks of ()", "strides of whole 16"),
        )
    ),
]
# The same ones where they are right.
RIGHT = [
    (sum_of_squares, {}),
    (two_squares, dict(waits=False, second=1)),
    (in_turn, dict(steps=f"{BOTH} wait1 release0 wait0 release1")),
    (in_turn, dict(steps=f"{AGAIN} {READ}")),
    (in_turn, dict(steps=f"{AGAIN} copy_other0 acquire0 release0 wait_empty0")),
    (in_turn, dict(steps="store0 add0 wait0 store0 sum0")),
    (steps_copied, dict(start=80, pieces=0)),
    (steps_copied, ONE_ATOM),
    (copied, TILE | dict(index=((0, 64), (64, 64)), out=True, where=False)),
    (copied, dict(tile=(256, 8), shape=(256, 8))),
]


def ids(rows):
    return [f"{x[0].__name__} {shown(x[1])[5:-1]}".strip() for x in rows]


@pytest.mark.quick("sum_of_squares", "steps_copied start=80")
@pytest.mark.parametrize(("kernel", "arguments"), RIGHT, ids=ids(RIGHT))
def test_a_kernel_that_waits_is_right(kernel, arguments):
    kernel(**arguments)


@pytest.mark.quick("sum_of_squares in_loop", "sum_of_squares unread", "two_squares waits")
@pytest.mark.timeout(45, method="thread")  # a signal does not end a kernel that waits
@pytest.mark.parametrize(("kernel", "wrong", "message"), CHECKS, ids=ids(CHECKS))
def test_a_defect_is_refused(kernel, wrong, message, capsys):
    """At once, although the other warpgroup waits for the one that has it."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as raised:
        kernel(**wrong)
    said = str(raised.value) + capsys.readouterr().out
    who = "" if message == RACE else rf"{kernel.__name__}(: warpgroup 0)? (.* )?"
    assert re.search(who + re.escape(message), said)


@pytest.mark.slow
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


def test_only_copies_py_starts_copies():
    """The interpreter checks those that ``copy_in`` and ``copy_out`` start."""
    files = Path(copies.__file__).parent.glob("*.py")
    started = {
        x.name for x in files if re.search(r"plgpu\.copy_\w+\(|\.async_copy\(", x.read_text())
    }
    assert started == {"copies.py", "inline_mlir.py"}


def blocks_of(jaxpr):
    """The equations of a jaxpr, and those of each jaxpr inside."""
    yield jaxpr.eqns
    for inner in (x for eqn in jaxpr.eqns for x in compile_report.inner_jaxprs(eqn)):
        yield from blocks_of(inner)


@pytest.mark.slow
def test_kernels_with_products_write_shared_memory_by_products_store():
    """What asks whether a product reads the tile, a callback, comes right before each write."""
    call = CASES["splits"].call
    run = engine.program(call, "mosaic_gpu")
    traced = jax.make_jaxpr(run)(engine.arrays(call, 1)).jaxpr
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


def test_regions_overlap_where_they_have_an_element_in_common():
    """Parts of an axis of four elements, alone and beside another axis; a region that names no
    axis is all of its buffer."""
    overlap, parts = (
        mosaic_gpu_interpreter._overlap,
        [(a, n) for a in range(4) for n in range(1, 5 - a)],
    )
    for x, y in itertools.product(parts, repeat=2):
        common = not {*range(x[0], sum(x))}.isdisjoint(range(y[0], sum(y)))
        assert overlap([x], [y]) == overlap([(1, 1), x], [(0, 2), y]) == common, (x, y)
        assert not overlap([(0, 1), x], [(1, 1), y])
        assert overlap([x], [])
        assert overlap([], [y])
