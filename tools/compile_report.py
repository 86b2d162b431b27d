"""Compiles the kernels of mlstm_chunkwise or mlstm_recurrent_step for a GPU, and reports on them.

The report has their registers, spills and shared memory.

    python tools/compile_report.py --device=H200 --heads=128/256,256/512 --dtype=bfloat16
    python tools/compile_report.py --device=H200 --direction=fwbw --backend=mosaic_gpu

It needs no GPU. Each kernel is one row, printed as soon as it is compiled, and in a table at the
end. The exit code is 1 if a kernel does not compile or does not fit, and 2 if the request is wrong.

The compiler is the Triton package, not the build of Triton inside XLA, so the kernels that run can
have slightly different spills and shared memory. Mosaic GPU kernels are compiled by XLA itself,
which needs JAX's CUDA packages; the machine with the GPU may have another version of ptxas.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import reporting
import runner
import step_benchmark
from calls import VARIANTS, define_chunks, launch_of
from command import RequestError, known_name, one_line
from kernel_benchmark import MlstmPallas
from peers import Inputs, random_inputs
from pipelines import overwritten_operands
from shapes import Shape
from worker import ProcessEnded, Worker

from mlstm_pallas import KernelConfig, mlstm_recurrent_step
from mlstm_pallas.problem.gpu import Gpu, known_gpu
from mlstm_pallas.stages import STAGES

# Enough to make every stage's grid three-dimensional. The code of a kernel depends on them only
# through arrays beyond 2**32 bytes.
BATCH, NUM_HEADS = 1, 8
OF_STEPS = ("exp", "sigmoid", "unnormalised", "slots")

COMPILE_SECONDS = 1800.0  # of the kernels of a call


NAMES = "A100", "A10", "RTX 3090", "L4", "L40S", "RTX 4090"
NAMES += "H20", "H100", "GH200", "H200", "B200", "RTX 5090"
DEVICES = {x.replace(" ", ""): gpu for x in NAMES if (gpu := known_gpu(f"NVIDIA {x}"))}


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A kernel as JAX passes it to the compiler: Triton IR and launch parameters.

    cause says why there is no IR.
    """

    name: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    ir: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel.

    Attributes:
      registers: per thread.
      spill_store_bytes, spill_load_bytes: per thread, as in the code: not multiplied by the
        iterations of a loop.
      shared_bytes: per CTA.
      wgmma, mma, cp_async: instructions in the code: Hopper's matrix products, those of other
        generations, asynchronous copies.
      compile_seconds: Triton IR to machine code; for a Mosaic GPU kernel from its jaxpr on.
      messages: SERIALIZED if every wgmma waits for the one before, and the codes of what ptxas says
        of wgmma, C75..
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    cp_async: int
    compile_seconds: float
    messages: tuple[str, ...] = ()


def _triton_ir(lowered):
    """The Triton IR, as text, of the one kernel in a lowered computation."""
    # JAX has no public way to it: the custom call holds MLIR bytecode, which only the dialects
    # inside jaxlib can read, and the Triton package needs text.
    from jax._src.lib.mlir import ir
    from jax._src.lib.triton import dialect

    kernels, target = [], "__gpu$xla.gpu.triton"

    def visit(op):
        x = op.attributes
        if op.name == "stablehlo.custom_call" and x["call_target_name"].value == target:
            kernels.append(x["mhlo.backend_config"]["ir"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    [kernel] = kernels
    context = ir.Context()
    context.allow_unregistered_dialects = True  # gpu, of the barriers
    dialect.register_dialect(context)
    with context, ir.Location.unknown():
        kernel = ir.Module.parse(kernel)
        text = kernel.operation.get_asm(enable_debug_info=False)
    # An operation of an unregistered dialect is printed with properties that Triton refuses.
    return re.sub(r'"gpu\.barrier"\(\).*', "gpu.barrier", text)


def inner_jaxprs(equation):
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


def equations(jaxpr, primitive):
    """The equations of a primitive in a jaxpr and in the jaxprs inside."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner, primitive)


def _target(kind):
    device = AbstractDevice(kind, None, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def trace(fn, *shapes, device):
    """The jaxpr of fn(*shapes) on the device."""
    with _target(device.name):
        return jax.make_jaxpr(fn)(*shapes).jaxpr


def lower(call):
    """The kernel of a pallas_call equation."""
    launch = call.params["compiler_params"]
    name, grid = call.params["name"], tuple(call.params["grid_mapping"].grid)
    ir = cause = ""
    args = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]
    try:
        # JAX >= 0.11 lowers only for the kinds of device that it knows. The tiles are chosen
        # already; from here on the kind decides about nothing but casts to float8.
        with _target("NVIDIA H200"):
            traced = jax.jit(functools.partial(call.primitive.bind, **call.params)).trace(*args)
            ir = _triton_ir(traced.lower(lowering_platforms=("cuda",)))
    except Exception as error:
        cause = one_line(error)
    return Lowered(name, grid, launch.num_warps, launch.num_stages, ir, cause)


def lowered_kernels(jaxpr):
    """The distinct kernels of a jaxpr in order of appearance.

    Each is lowered by itself, so that all are tried.
    """
    return list(dict.fromkeys(map(lower, equations(jaxpr, "pallas_call"))))


def parse_ptxas(log):
    """(registers, bytes of spill stores, bytes of spill loads) per thread of a kernel.

    The log is what ptxas -v prints; the functions that the kernel calls count too.
    """
    registers = re.findall(r"Used (\d+) registers", log)
    # A warning has the spills a second time, without the frame.
    spills = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise ValueError(f"no registers or spills in the output of ptxas -v: {log!r}")
    stores, loads = (sum(map(int, column)) for column in zip(*spills, strict=True))
    return max(map(int, registers)), stores, loads


def _compile(text, num_warps, num_stages, capability):
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", capability, 32))
    options = backend.parse_options(dict(num_warps=num_warps, num_stages=num_stages))
    context, log, start = ir.context(), io.StringIO(), time.perf_counter()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages, metadata, asm = {}, {}, {}
    # All stages, as XLA runs them: triton.compile takes a file with IR for the result of the first.
    # Without the first a product is not folded into the accumulator that it is added to, and
    # accumulators are counted twice.
    backend.add_stages(stages, options, Language.TRITON)
    with (
        tempfile.NamedTemporaryFile("w", suffix=".ttir") as file,
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.nvidia.dump_ptxas_log = True
        print(text, file=file, flush=True)
        module = ir.parse_mlir_module(file.name, context)
        module.context = context
        for name, stage in stages.items():
            module = stage(module, metadata)
            asm[name] = str(module)  # the next stage changes it
    seconds = time.perf_counter() - start
    if overwritten := overwritten_operands(asm["ttgir"], num_stages):
        what = "a copy may overwrite what a running product reads"
        raise RuntimeError(f"{what}, in {len(overwritten)} pipelined tiles (pipelines.py)")
    return _usage(asm["ptx"], log.getvalue(), metadata["shared"], seconds)


def _usage(ptx, log, shared_bytes, seconds):
    return Usage(
        *parse_ptxas(log),
        shared_bytes=shared_bytes,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=len(re.findall(r"\bmma\.sync|tcgen05\.mma", ptx)),
        cp_async=len(re.findall(r"cp\.async\.(?:c[ag]|bulk\.tensor)\.", ptx)),
        compile_seconds=seconds,
        messages=messages_of(log),
    )


SERIALIZED = "wgmma serialized"


def messages_of(log):
    serialized = [SERIALIZED] if "wgmma.mma_async instructions are serialized" in log else []
    return (*serialized, *sorted(set(re.findall(r"\((C75\d\d)\)", log))))


COMPILER = Worker(_compile)


@functools.cache
def compile_kernel(ir, num_warps, num_stages, capability):
    """Compiles Triton IR to machine code, each kernel once per process.

    Raises:
      ProcessEnded: the compiler refuses the kernel; the message is the cause, on one line.
    """
    if importlib.util.find_spec("triton") is None:
        raise RequestError("triton is missing: pip install 'mlstm_pallas[test]'")
    return COMPILER(ir, num_warps, num_stages, capability, seconds=COMPILE_SECONDS)


# ---------------------------------------------------------------- Mosaic GPU


# With these variables Mosaic GPU prints what it compiles; a program from the user's cache would
# print nothing. With MOSAIC_GPU_DUMP_TO=folder it would also write each pass, which takes four
# times as long as compiling.
PRINTING = dict.fromkeys((f"MOSAIC_GPU_DUMP_{x}" for x in ("PTX", "PTXAS", "RESOURCES")), "1")
PRINTING |= dict(JAX_ENABLE_COMPILATION_CACHE="false")
PRINTED = re.compile(r"(?P<ptx>^//\n// Generated by LLVM.*?)(?P<log>^ptxas .*)", re.M | re.S)


@contextlib.contextmanager
def printed_to(path):
    """What the process prints, libraries included, is in this file at the end."""
    before = os.dup(1)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(before, 1)
        os.close(before)


# A Hopper GPU as XLA describes it, to compile for without one.
HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814272000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150121545728
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


def on_a_hopper():
    """Arrays with this sharding are on one Hopper GPU, which need not be there."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=HOPPER, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    return NamedSharding(mesh, PartitionSpec())


def _compile_mosaic_gpu(call, relocatable, folder):
    """The distinct Mosaic GPU kernels of a call, each with its usages.

    It runs in another process, with the variables PRINTING.
    """
    kernels, sharding, output = {}, on_a_hopper(), Path(folder, "output")
    for equation in equations(call.traced(), "mpmd_map"):
        if str(equation) in kernels:
            continue
        (mesh,) = equation.params["meshes"]
        grid, num_warps = (*mesh.grid, *mesh.cluster), 4 * (mesh.num_threads or 1)
        kernel = Lowered(equation.params["name"], grid, num_warps, 0)
        avals = [x.aval for x in equation.invars]
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in avals]
        function = functools.partial(equation.primitive.bind, **equation.params)
        start, usages = time.perf_counter(), [None for _ in relocatable]
        try:
            with printed_to(output):
                jax.jit(function).lower(*args).compile()
            seconds = time.perf_counter() - start
            usages = [_printed_usage(output, seconds, mode) for mode in relocatable]
        except Exception as error:
            kernel = dataclasses.replace(kernel, cause=one_line(error))
        kernels[str(equation)] = kernel, *usages
    return list(kernels.values())


def relocatable_log(ptx):
    """The log of ptxas for relocatable code, as nvJitLink makes it: the same code, to the byte.

    jax >= 0.12 compiles with nvJitLink if it finds the library. setmaxnreg is then ignored.
    """
    folders = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin")
    ptxas = shutil.which("ptxas", path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    if ptxas is None:
        raise RequestError("--relocatable needs ptxas: pip install nvidia-cuda-nvcc")
    command = [ptxas, "-c", "-v", "-O3", "-arch=sm_90a", str(ptx), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr + done.stdout


def _printed_usage(output, seconds, relocatable):
    text = output.read_text(errors="replace")
    if not (printed := PRINTED.search(text)):
        raise ValueError(f"no PTX and no log of ptxas in what Mosaic GPU prints: {text!r}")
    ptx, log = printed["ptx"], printed["log"]
    if relocatable:
        path = output.with_name("kernel.ptx")
        path.write_text(ptx)
        log = relocatable_log(path)
    return _usage(ptx, log, parse_resources(text), seconds)


def parse_resources(text):
    """Shared memory of a Mosaic GPU kernel: its buffers, and 8 bytes for each barrier."""
    scratch = re.search(r"smem_scratch_bytes=(\d+)", text)
    if not scratch:
        raise ValueError(f"no shared memory in the resources of a kernel: {text!r}")
    barriers = re.findall(r"num_barriers=(\d+)[^:}]*\): (\d+)", text)
    return int(scratch[1]) + 8 * sum(int(size) * int(count) for size, count in barriers)


def mosaic_gpu_kernels(call, relocatable=()):
    """The distinct Mosaic GPU kernels of a call, compiled in another process.

    Each comes with its usage, or with one per value of ``relocatable``.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        packages = "JAX's CUDA packages: pip install 'mlstm_pallas[cuda]'"
        raise RequestError(f"--backend=mosaic_gpu needs {packages}")
    with tempfile.TemporaryDirectory() as folder:
        variables = PRINTING | dict(JAX_PLATFORMS="cpu")
        with contextlib.closing(Worker(_compile_mosaic_gpu, variables)) as compiler:
            relocatable = relocatable or [call.relocatable]
            return compiler(call, relocatable, folder, seconds=COMPILE_SECONDS)


# ---------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose kernels are compiled; see ``report``. Another process can have it."""

    device: Gpu
    DHQK: int
    DHV: int
    dtype: str
    seqlen: int = 8192
    chunk_size: int | None = None
    config: KernelConfig | None = None
    direction: str = "fwd"
    variant: str = "exp"
    backend: str = "triton"
    relocatable: bool = False  # Mosaic GPU kernels as nvJitLink compiles them

    @property
    def shape(self):
        steps = 1 if self.direction == "step" else self.seqlen
        return Shape(BATCH, NUM_HEADS, steps, self.DHQK, self.DHV)

    def implementation(self):
        chunks = self.chunk_size, self.config
        return MlstmPallas(
            self.backend, self.shape, self.dtype, *chunks, self.variant, gpu=self.device
        )

    def spec(self):
        return self.implementation().spec

    def traced(self):
        """Its jaxpr."""
        if self.direction == "step":
            options = dict(VARIANTS.get(self.variant, {}), backend=self.backend, config=self.config)
            if self.variant == "slots":
                options["slots"] = jax.numpy.zeros(BATCH, "int32")
            random = functools.partial(step_benchmark.random_inputs, self.shape, *[self.dtype] * 2)

            def run(token, states):
                return mlstm_recurrent_step(*token, *states, **options)
        else:
            random = functools.partial(random_inputs, jax.random.key(0), self.shape, self.dtype)

            def run(*inputs):
                function, args = self.implementation().computation(Inputs(*inputs), self.direction)
                return function(*args)

        return trace(run, *jax.eval_shape(random), device=self.device)

    def kernels(self):
        """Triton kernels, not compiled yet, and compiled Mosaic GPU kernels."""
        triton = [(kernel, None) for kernel in lowered_kernels(self.traced())]
        return triton + (mosaic_gpu_kernels(self) if self.backend == "mosaic_gpu" else [])


def too_much_shared_memory(usage, device):
    """Why a kernel does not fit the device; "" if it does."""
    if usage.shared_bytes <= device.shared_bytes:
        return ""
    limit = f"the device has {device.shared_bytes}"
    return f"takes {usage.shared_bytes} bytes of shared memory, {limit}"


def row_of(kernel, usage, call, spec):
    """A kernel, the tiles that its stage reads (none for helpers), and what it takes."""
    cause, tiles = kernel.cause, dict(chunk_size=spec.problem.L, config={})
    if kernel.name in STAGES:
        launch = launch_of(spec, kernel.name)
        tiles = dict(chunk_size=launch.problem.L, config=dict(vars(launch.tiles)))
    if not (usage or cause):
        how = kernel.num_warps, kernel.num_stages, call.device.capability
        try:
            usage = compile_kernel(kernel.ir, *how)
        except ProcessEnded as error:
            cause = str(error)
    cause = cause or (usage and too_much_shared_memory(usage, call.device)) or ""
    row = {x: y for x, y in vars(kernel).items() if x not in ("name", "ir", "cause")}
    row |= dict(stage=kernel.name, status="failed" if cause else "ok", note=cause)
    return row | tiles | (vars(usage) if usage else {})


def report(device, heads, dtypes, *, stages=(), **options):
    """Compiles the kernels of calls and yields a row for each kernel.

    A row has the fields of its ``Lowered`` and ``Usage``; note is why it does not compile or fit.

    Args:
      device: a name in DEVICES.
      heads: (DHQK, DHV) of each call.
      dtypes: of q, k, v of each call.
      stages: only these; empty: all.
      options: fields of Call.
    """
    for (DHQK, DHV), dtype in itertools.product(heads, dtypes):
        call = Call(DEVICES[device], DHQK, DHV, dtype, **options)
        if call.variant not in (OF_STEPS if call.direction == "step" else VARIANTS):
            kind = "step" if call.direction == "step" else "sequence"
            raise RequestError(f"--variant: a {kind} has no variant {call.variant}")
        case = dict(
            name=f"{DHQK}/{DHV}",
            shape=call.shape,
            impl=call.backend,
            dtype=dtype,
            device=device,
            direction=call.direction,
            variant=call.variant,
        )
        try:
            spec, kernels = call.spec(), call.kernels()
        except RequestError:
            raise
        except Exception as error:
            yield case | dict(stage="(tracing)", status="failed", note=one_line(error))
            continue
        names = list(dict.fromkeys(kernel.name for kernel, _ in kernels))
        if missing := [stage for stage in stages if stage not in names]:
            absent = f"no stage {', '.join(missing)} in {call.direction}"
            raise RequestError(f"--stage: {absent}, there are {', '.join(names)}")
        for kernel, usage in kernels:
            if not stages or kernel.name in stages:
                yield case | row_of(kernel, usage, call, spec)


def tiles_of(row):
    """The fields of the tiles; the warps have a column of their own."""
    tiles = {name.removeprefix("siz_b_"): x for name, x in row.get("config", {}).items()}
    return " ".join(f"{name}={x}" for name, x in tiles.items() if name != "num_warps")


def spills_of(row):
    """Bytes stored/loaded."""
    return f"{row['spill_store_bytes']}/{row['spill_load_bytes']}" if "registers" in row else None


def shared_of(row):
    """KiB used/available."""
    available = DEVICES[row["device"]].shared_bytes // 1024
    return f"{row['shared_bytes'] / 1024:.1f}/{available}" if "registers" in row else None


COLUMNS = reporting.columns(
    """
heads       name
dtype       dtype
stage       stage
L           chunk_size       d
grid        grid             s
tiles       tiles
warps       num_warps        d
regs        registers        d
spill B     spills           s
shared KiB  shared           s
wgmma       wgmma            d
mma         mma              d
cp.async    cp_async         d
s           compile_seconds  .1f
ptxas       ptxas            s
note        note
""",
    grid=lambda row: "x".join(map(str, row.get("grid", ()))),
    tiles=tiles_of,
    spills=spills_of,
    shared=shared_of,
    ptxas=lambda row: " ".join(row.get("messages", ())),
)


def parse_device(text):
    return known_name(DEVICES, text.upper())


def parse_heads(text):
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text.strip())
    if not match:
        raise ValueError(f"cannot read the head sizes {text!r}, expected DHQK/DHV as in 128/256")
    return int(match[1]), int(match[2])


def define_flags(define):
    direction = "Forward, gradient with it, or one recurrent step."
    variant = "Input gate, normaliser and layout; packed: with segment_ids; slots: of a step."
    relocatable = "The kernels of mosaic_gpu as nvJitLink compiles them, for jax >= 0.12."
    define.parsed("device", parse_device, f"GPU to compile for: {', '.join(DEVICES)}; none: H200.")
    define.items("heads", "64/64,128/256,256/512", parse_heads, "Head sizes, DHQK/DHV each.")
    define.list("stage", [], "Only these stages; empty: all.")
    define.integer("seqlen", 8192, "Steps of the sequence.", lower_bound=1)
    define.enum("direction", "fwd", ["fwd", "fwbw", "step"], direction)
    define.enum("variant", "exp", [*VARIANTS, "slots"], variant)
    define.enum("backend", "triton", ["triton", "mosaic_gpu"], "mosaic_gpu: for Hopper GPUs.")
    define.bool("relocatable", False, relocatable)
    define.shared("commit", "from_jsonl", "jsonl", dtype="bfloat16,float32")
    define_chunks(define)


def measured_rows(options):
    """A row for each kernel of the calls that the flags ask for."""
    same = "chunk_size", "config", "seqlen", "direction", "variant", "backend", "relocatable"
    settings = {name: options[name].value for name in same}
    case = options.device or "H200", options.heads, options.dtype
    for row in report(*case, stages=options.stage, **settings):
        yield runner.new_row(options, row["name"], row["shape"], row["impl"]) | row


run = functools.partial(runner.run, measured_rows, COLUMNS)


if __name__ == "__main__":
    command.main(define_flags, run)
