"""GPU interpret mode refuses what a running product still uses: only on a GPU would it be wrong."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Jaxpr
from mosaic_gpu_cases import CASES, needs_mosaic_gpu
from oracle import cotangents_for, gradients_of_call, random_inputs

from mlstm_pallas.mosaic_gpu.launch import mosaic_call, plgpu, tile_transforms
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.tiles import remainder

pytestmark = needs_mosaic_gpu

R, STEPS, SLOTS = 64, 5, 2
PRODUCTS = Products(interpret=True)


def launch(kernel, name, *, warpgroups=1, **scratch):
    """x and y of kernel(x, y, **scratch): x (STEPS * 64, 64), given as tiles, and y (2, 64, 64)."""
    call = mosaic_call(
        kernel,
        name=name,
        grid={"program": 1},
        warpgroups=warpgroups,
        outputs={"y": jax.ShapeDtypeStruct((2, R, R), jnp.float32)},
        scratch=scratch,
        interpret=True,
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS * R, R)), jnp.bfloat16)
    y = jax.jit(lambda x: call(x=x)["y"])(x)
    return np.asarray(x.astype("float32")).reshape(STEPS, R, R), np.asarray(y)


def tiles(count):
    return plgpu.SMEM((count, R, R), jnp.bfloat16, transforms=tile_transforms(R, 2))


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def sum_of_squares(*, in_loop=1, after_loop=0, guards=True, releases=True):
    """The sum of x_j x_j, of tiles that another warpgroup copies.

    Args:
      in_loop, after_loop: how many products may run on when a slot is released.
    """

    def kernel(x, y, left, right, full, empty):
        wg = lax.axis_index("wg")
        if guards:
            PRODUCTS.guard(empty, left, right)

        @pl.when(wg == 1)
        def copy():
            for j in range(STEPS):
                slot = j % SLOTS
                if j >= SLOTS:
                    plgpu.barrier_wait(empty.at[slot])
                for tile in (left, right):
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(j * R, R)], tile.at[slot], full.at[slot])
            for j in range(STEPS - SLOTS, STEPS):
                plgpu.barrier_wait(empty.at[j % SLOTS])

        def add(accumulator):
            def one(j, carry):
                slot = remainder(j, SLOTS)
                plgpu.barrier_wait(full.at[slot])
                PRODUCTS.add(accumulator, left.at[slot], right.at[slot])
                PRODUCTS.wait(in_loop)
                before = remainder(j - 1, SLOTS)
                pl.when((j > 0) & releases)(lambda: PRODUCTS.release(empty.at[before]))
                return carry

            PRODUCTS.loop(accumulator, STEPS, one)
            PRODUCTS.wait(after_loop)
            PRODUCTS.release(empty.at[(STEPS - 1) % SLOTS])

        @pl.when(wg == 0)
        def multiply():
            y[0] = PRODUCTS.from_zeros(add, R, R)

    scratch = dict(
        left=tiles(SLOTS),
        right=tiles(SLOTS),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
    )
    x, y = launch(kernel, "sum_of_squares", warpgroups=2, **scratch)
    assert_close(y[0], sum(tile @ tile for tile in x))


def two_squares(*, waits, second=0, pending=1):
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
                    PRODUCTS.wait(0)
                PRODUCTS.store(tile.at[slot].T, x.at[pl.ds(j * R, R)][...])
                plgpu.commit_smem()
                PRODUCTS.add(sums[j], tile.T.at[:, :, slot], tile.at[slot].T)
            y[0] = PRODUCTS.read(sums[0], pending)

        y[1] = PRODUCTS.all_from_zeros(both, (R, R), (R, R))[2]

    x, y = launch(kernel, "two_squares", tile=tiles(2))
    for result, own in zip(y, x[:2], strict=True):
        assert_close(result, own @ own)


RIGHT = {
    "one product runs on": functools.partial(sum_of_squares),
    "no product runs on": functools.partial(sum_of_squares, in_loop=0),
    "a wait before the tile is written again": functools.partial(two_squares, waits=True),
    "tiles of their own": functools.partial(two_squares, waits=False, second=1),
}
READ = "which a running product reads, expected Products.wait before"
DEFECTS = {
    "a product of one iteration, released in the next": (
        functools.partial(sum_of_squares, in_loop=2),
        f"sum_of_squares: warpgroup 0 releases empty of left, {READ}",
    ),
    "no wait before a release": (
        functools.partial(sum_of_squares, after_loop=1),
        f"sum_of_squares: warpgroup 0 releases empty of right, {READ}",
    ),
    "no wait before the tile is written again": (
        functools.partial(two_squares, waits=False),
        f"two_squares: warpgroup 0 writes tile, {READ}",
    ),
    "an accumulator that is read too early": (
        functools.partial(two_squares, waits=False, second=1, pending=2),
        r"two_squares: warpgroup 0 reads accumulator \d+, to which a running product adds",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_kernel_that_waits_is_right(name):
    RIGHT[name]()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_missing_wait_is_refused(name):
    run, message = DEFECTS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run()
    RIGHT["tiles of their own"]()  # the next launch is none the worse


def test_a_release_of_nothing_known_is_refused():
    message = r"sum_of_squares releases empty, of which no Products\.guard says what it guards"
    with pytest.raises(ValueError, match=message):
        sum_of_squares(guards=False)


@pytest.mark.slow
def test_a_kernel_that_waits_for_ever_ends_the_run(tmp_path):
    """By the timeout of pyproject.toml, made shorter. The output has the name of the test."""
    tests = Path(__file__).parent
    test = tmp_path / "test_that_hangs.py"
    call = "test_products.sum_of_squares(releases=False)"
    test.write_text(f"import test_products\n\ndef test_of_a_missing_release():\n    {call}\n")
    options = ("-c", tests.parent / "pyproject.toml", "-o", "timeout=5", "-p", "no:cacheprovider")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [tests, tests.parent, *sys.path]))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "+ Timeout +" in done.stdout
    assert "in test_of_a_missing_release" in done.stdout


def jaxprs_in(jaxpr):
    """A jaxpr, and those of its equations."""
    yield jaxpr
    of_equations = [eqn.params for eqn in jaxpr.eqns]
    for x in jax.tree.leaves(of_equations, is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
        if isinstance(x, Jaxpr | ClosedJaxpr):
            yield from jaxprs_in(x.jaxpr if isinstance(x, ClosedJaxpr) else x)


@pytest.mark.parametrize("name", ["states_BTNH", "narrow"])
def test_kernels_with_products_write_shared_memory_by_products_store(name):
    """What asks whether a product reads the tile, a callback, comes right before each write."""
    case = CASES[name]
    inputs = random_inputs(5, *case.shape, dtype=case.dtype)
    run = gradients_of_call(config=case.config, backend="mosaic_gpu_interpret")
    traced = jax.make_jaxpr(run)(inputs, cotangents_for(inputs, case.dtype)).jaxpr
    equations = [eqn for jaxpr in jaxprs_in(traced) for eqn in jaxpr.eqns]
    checked, unchecked = 0, []
    for kernel in (x.params["jaxprs"][0] for x in equations if x.primitive.name == "mpmd_map"):
        blocks = [jaxpr.eqns for jaxpr in jaxprs_in(kernel)]
        if not any(eqn.primitive.name == "dot_general" for eqns in blocks for eqn in eqns):
            continue
        for eqns in blocks:
            names = [None, *(eqn.primitive.name for eqn in eqns)]
            for before, eqn in zip(names, eqns, strict=False):
                if eqn.primitive.name not in ("swap", "store"):
                    continue
                if eqn.invars[0].aval.memory_space != plgpu.SMEM:
                    continue
                if before == "io_callback":
                    checked += 1
                else:
                    unchecked.append(str(eqn))
    assert checked > 4
    assert not unchecked
