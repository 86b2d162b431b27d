"""Runs functions of JAX in NumPy, one operation at a time.

XLA takes about a second to compile an oracle or an interpreted kernel, and does so for each shape.
NumPy takes milliseconds for the small arrays of most tests, and does not depend on XLA's rewrites.
numpy_operations.py has its forms of the operations; others run in JAX.
"""

import contextlib
import functools
import math
import threading
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.core import get_axis_env
from jax._src.pallas import hlo_interpreter
from numpy_operations import OPERATIONS

# Estimated seconds: per operation, per element, per product in a matrix product, and to compile.
OPERATION, ELEMENT, PRODUCT, COMPILER = 2e-6, 3e-9, 2e-10, 1.0


def in_numpy(function):
    """Wraps a function of JAX: the same results as arrays of NumPy, compiled only if faster."""

    @functools.wraps(function)
    def evaluated(*x):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*x)
        if _seconds(closed) > COMPILER:
            return jax.tree.map(np.asarray, jax.jit(function)(*x))
        # A program that is kept would keep its constants, of which jax 0.11 then has 64 bits even
        # where an array is an argument of a call in 32 bits.
        outputs = _results(Program(closed.jaxpr), closed.consts, jax.tree.leaves(x))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(np.asarray, outputs))

    return evaluated


def jit(function, always=False):
    """Like jax.jit, but programs with interpreted kernels, or all, run in NumPy."""
    jitted = jax.jit(function)

    @functools.wraps(function)
    def called(*x, **more):
        if any(isinstance(y, jax.core.Tracer) for y in jax.tree.leaves((x, more))):
            return jitted(*x, **more)
        traced = jitted.trace(*x, **more)
        if not (always or _interprets(traced.jaxpr)):
            return jitted(*x, **more)
        outputs = evaluate(traced.jaxpr, *jax.tree.leaves((x, more)))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), map(np.asarray, outputs))

    return called


def _interprets(closed):
    """Whether there is an interpreted kernel."""
    eqns = getattr(closed, "jaxpr", closed).eqns
    return any(x.params.get("interpret") or any(map(_interprets, jaxprs_in(x))) for x in eqns)


def evaluate(closed, *args, consts=None):
    """The results of a jaxpr, whose program is kept; consts: instead of those that it has."""
    return _results(_program(closed.jaxpr), closed.consts if consts is None else consts, args)


def _results(program, consts, args):
    with np.errstate(all="ignore"):
        return program(*map(np.asarray, (*consts, *args)))


@functools.lru_cache(maxsize=256)
def _program(jaxpr):
    return Program(jaxpr)


class Program:
    """A jaxpr as a list of steps on numbered values, with the steps of the jaxprs that it calls.

    What depends on no input is computed once.
    """

    def __init__(self, jaxpr):
        self.values, self.steps = [], []
        self.known = set()  # numbers of values that are computed here
        numbers = {x: self._new() for x in (*jaxpr.constvars, *jaxpr.invars)}
        self.inputs = [*numbers.values()]
        self.outputs = self._add(jaxpr, numbers)

    def __call__(self, *args):
        values = [*self.values]
        for i, x in zip(self.inputs, args, strict=True):
            values[i] = x
        _run(self.steps, values)
        return [values[i] for i in self.outputs]

    def _new(self, value=None):
        """The number of another value."""
        self.values.append(value)
        return len(self.values) - 1

    def _constant(self, value):
        self.known.add(number := self._new(np.asarray(value)))
        return number

    def _add(self, jaxpr, numbers):
        """Adds the steps of a jaxpr whose inputs have these numbers. Returns those of its
        outputs."""

        def number(x):
            literal = hasattr(x, "val")
            return self._constant(np.asarray(x.val, x.aval.dtype)) if literal else numbers[x]

        for eqn in jaxpr.eqns:
            operands = [*map(number, eqn.invars)]
            if eqn.primitive.name in CALLS:
                [inner] = (eqn.params[name] for name in CALLED & {*eqn.params})
                inner, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                inside = dict(zip(inner.invars, operands, strict=True))
                inside |= zip(inner.constvars, map(self._constant, consts), strict=True)
                numbers |= zip(eqn.outvars, self._add(inner, inside), strict=True)
                continue
            results = [self._new() for _ in eqn.outvars]
            numbers |= zip(eqn.outvars, results, strict=True)
            step = _function_of(eqn), operands, results, [x.aval.dtype for x in eqn.outvars]
            if not eqn.effects and self.known.issuperset(operands):
                _run([step], self.values)
                self.known.update(results)
            else:
                self.steps.append(step)
        return [*map(number, jaxpr.outvars)]


def _run(steps, values):
    for function, operands, results, dtypes in steps:
        y = function(*[values[i] for i in operands])
        y = y if isinstance(y, list | tuple) else (y,)
        for i, x, dtype in zip(results, y, dtypes, strict=True):
            values[i] = x if x.dtype == dtype else x.astype(dtype)


def _function_of(eqn):
    """Of NumPy's arrays, or of JAX's where NumPy has no form."""
    name, params = eqn.primitive.name, eqn.params
    if name == "pallas_call" and params["interpret"] is True:
        options = {key: x for key, x in params.items() if key not in ("interpret", "backend")}
        return _inner(_interpretation(interpret_kernel, [x.aval for x in eqn.invars], options))
    if name in LOOPS:
        return LOOPS[name](**params)
    if name in OPERATIONS:
        function = OPERATIONS[name]
        return function if isinstance(function, np.ufunc) else functools.partial(function, **params)

    def in_jax(*args):
        results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
        return [*map(np.asarray, results if eqn.primitive.multiple_results else [results])]

    return in_jax


def _seconds(closed):
    """That NumPy takes, roughly: a while loop counts as one turn, a cond as all its branches."""
    return sum(map(_seconds_of, getattr(closed, "jaxpr", closed).eqns))


def jaxprs_in(eqn):
    """The programs that an operation runs, as loops and calls do."""
    params = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    return [x for x in params if hasattr(x, "eqns")]


def _seconds_of(eqn):
    if inner := jaxprs_in(eqn):
        return eqn.params.get("length", 1) * sum(map(_seconds, inner))
    sizes = [math.prod(x.aval.shape) for x in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
        return OPERATION + PRODUCT * terms * sizes[-1]
    return OPERATION + ELEMENT * max(sizes)


def _inner(closed):
    """A jaxpr of an operation, as a function of its arguments."""
    return functools.partial(Program(closed.jaxpr), *map(np.asarray, closed.consts))


def _scan(*, jaxpr, length, reverse, ft_in=None, num_consts=None, num_carry=None, **_):
    if ft_in is not None:  # jax >= 0.11
        num_consts, num_carry, _ = (len([*x]) for x in ft_in.unpack())
    body, order = _inner(jaxpr), range(length)
    shapes = jaxpr.out_avals[num_carry:]

    def scan(*args):
        consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
        xs, rows = args[num_consts + num_carry :], []
        for step in reversed(order) if reverse else order:
            results = body(*consts, *carry, *(x[step] for x in xs))
            carry, row = results[:num_carry], results[num_carry:]
            rows.append(row)
        if not length:
            return *carry, *(np.zeros((0, *x.shape), x.dtype) for x in shapes)
        return *carry, *map(np.stack, zip(*(reversed(rows) if reverse else rows), strict=True))

    return scan


def _while(*, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts):
    goes_on, body = _inner(cond_jaxpr), _inner(body_jaxpr)
    ends = cond_nconsts, cond_nconsts + body_nconsts

    def loop(*args):
        of_cond, of_body, carry = args[: ends[0]], args[ends[0] : ends[1]], args[ends[1] :]
        while goes_on(*of_cond, *carry)[0]:
            carry = body(*of_body, *carry)
        return carry

    return loop


def _cond(*, branches, **_):
    branches = [*map(_inner, branches)]

    def cond(index, *args):
        return branches[min(max(int(index), 0), len(branches) - 1)](*args)

    return cond


def _callback(*, callback, **_):
    """A function on the host, which gets numbers for scalars."""

    def call(*args):
        args = (x if x.shape or x.dtype.kind not in "bi" else x.item() for x in args)
        return [*map(np.asarray, callback(*args))]

    return call


LOOPS = {"scan": _scan, "while": _while, "cond": _cond, "io_callback": _callback}
CLOSED = {"closed_call", "eval_jaxpr"}  # in jax 0.10, and in later ones
CALLS = {"jit", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"} | CLOSED
CALLS |= {"custom_partitioning"}
CALLED = {"jaxpr", "call_jaxpr", "call"}
interpret_kernel = hlo_interpreter.pallas_call_hlo_interpret
TURN = threading.Lock()


@contextlib.contextmanager
def kernels_in_numpy():
    """Inside, the kernels that JAX interprets run in NumPy, called by what XLA compiles."""
    with contextlib.ExitStack() as stack:
        if hlo_interpreter.pallas_call_hlo_interpret is interpret_kernel:
            stack.enter_context(on_host(hlo_interpreter, "pallas_call_hlo_interpret", COMPILER))
            # jax's form copies the arrays to a device and back.
            stack.enter_context(mock.patch.object(callback, "pure_callback_impl", _called))
        yield


def compiled_kernels():
    """Inside, XLA compiles them all the same."""
    return mock.patch.object(hlo_interpreter, "pallas_call_hlo_interpret", interpret_kernel)


def _called(*args, callback, **_):
    return callback(*args)


def _shapes(arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _interpretation(interpret, arrays, params):
    """The jaxpr that interprets a kernel of such arrays."""
    return jax.make_jaxpr(functools.partial(interpret, **params))(*_shapes(arrays))


def on_host(module, name, seconds=math.inf):
    """Inside, the kernels that a function of ``module`` interprets run in NumPy, if it takes no
    more than so many seconds."""
    interpret = getattr(module, name)

    def called(*args, **params):
        if get_axis_env().axis_sizes:  # of a mesh
            return interpret(*args, **params)
        closed = _interpretation(interpret, args, params)
        if math.prod(params["grid_mapping"].grid) * _seconds(closed) > seconds:
            return interpret(*args, **params)

        def run(*args):
            with TURN:
                return evaluate(closed, *args)

        return jax.pure_callback(run, _shapes(closed.out_avals), *args)

    return mock.patch.object(module, name, called)
