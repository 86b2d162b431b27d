"""The documents name files, identifiers and limits that exist; the Python code of each page runs
as it stands."""

import functools
import itertools
import re
import sys
import tomllib
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_server
from compile_report import equations
from oracle import collectives, compare, mesh_for, needs_mosaic_gpu, shapes_and_dtypes, slow
from plans import plan
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser
from test_import_graph import LAYER, PACKAGE

import mlstm_pallas
from mlstm_pallas import (
    KernelConfig,
    __version__,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
    selfcheck,
)
from mlstm_pallas.planning.backend import MOSAIC_GPU_JAX

ROOT = PACKAGE.parent
FILES = [x for y in ("mlstm_pallas", "[tbe]*") for x in ROOT.glob(f"{y}/**/*.py")]
WORDS: dict[str, set[str]] = {}  # of all files of a name
for x in FILES:
    WORDS.setdefault(x.name, {x.stem}).update(re.findall(r"\w+", x.read_text()))
# Names of jax, of LLVM, of NCCL, of an experiment that failed, and of other packages.
FOREIGN = """
segment_sum async_prefetch barrier_arrive ClusterBarrier maxnumf operand_maps pmean pth
get_mlstm_kernel max_triton_fwbw_v3 v3noslice mLSTMBackend xLSTMBackend parallel_stabilized_simple
reduce_slicing store_final_state save_states_every_nth_chunk chunk_size_inter chunk_size_intra
head_first vecN_all scaM_all vecM_out matC_all vecM_combine scaMinter_initial chunk_simple_gla
mLSTMBackendConfig xLSTMConfig xLSTMForCausalLM xLSTMLarge g_gamma Config mode
pack_alignment_struct ncclGetPeerDevicePointer psum_scatter jax_default_matmul_precision
on_get_value _mosaic_gpu_kernel XLA_CLIENT_MEM_FRACTION
MultiSteps apply_if_finite inject_hyperparams ConcatThenSplitIterDataset best_fn metrics
WindowShuffleMapDataset one_hot get_weight_decay_optim_groups xLSTMLMModel CheckpointSave
addressable_shards shutdown_timeout_seconds heartbeat_timeout_seconds initialization_timeout
http_proxy https_proxy grpc_proxy no_proxy HTTP_PROXY _exit
"""
README, NOTES = ((ROOT / name).read_text() for name in ("README.md", "BUILD_NOTES.md"))
SITE = [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = "README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "benchmarks/README.md", *SITE
SLOW = "packing", "serving", "devices", "debugging", "exporting", "training", "bidirectional"
SLOW += "hosts", "examples/xlstm_7b"


def exists(name, page):
    """Whether there is such a file, or such an identifier, of the module if it names one."""
    if re.search(r"/|\.(py|md|toml)$", name):
        return name in WORDS or any((x / name).exists() for x in (ROOT, PACKAGE, page.parent))
    module, _, last = name.rpartition(".")
    return last in (WORDS.get(f"{module}.py") or {*FOREIGN.split()}.union(*WORDS.values()))


# Their tables have names of other packages, for whose rows test_migrating.py has calls, and they
# leave out beginnings of names.
OF_OTHERS = "migrating.md", "xlstm_jax_differences.md"


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    page = ROOT / page
    text = page.read_text().replace("```", "")
    if page.name in OF_OTHERS:
        text = re.sub(r"^\|.*|`_\w+`", "", text, flags=re.M)
    names = re.findall(r"`([A-Za-z_.][\w./]*)`|\]\((?!http|#)(.*?)(?:#.*?)?\)", text)
    assert not [a + b for a, b in names if not exists(a or b, page)]


@pytest.mark.parametrize("page", SITE)
def test_what_a_directive_shows_has_a_link_too(page):
    """For readers outside of the site, where directives are not run."""
    text = (ROOT / page).read_text()
    if re.search(r"^```{(include|eval-rst|literalinclude)}", text, re.M):
        assert re.search(r"^Outside of the site .*\]\(\.\./.*\)\.\n\n", text, re.M)


@pytest.mark.parametrize("page", PAGES)
def test_the_site_leaves_out_no_line(page):
    """MyST takes a line that begins with % for a comment."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert not re.findall(r"^ *%.*", text, re.M)


def test_the_file_map_names_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text.rpartition("## Files")[2].partition("```")[2].partition("```")[0]
    files = {x.name + "/" * x.is_dir() for x in PACKAGE.glob("[a-z]*")} - {"py.typed"}
    assert files == {*re.findall(r"\w+(?:\.py|/(?!\n))", block)}


def test_imports_run_from_left_to_right():
    diagram = NOTES.partition("    public API -> ")[2].partition("\n\n")[0]
    layers = [[LAYER[x] for x in re.findall(r"\w+", step)] for step in diagram.split("->")]
    assert sorted(itertools.chain(*layers))[-1] == max(LAYER.values())
    assert all(max(a) < min(b) for a, b in itertools.pairwise(layers))


def test_code_that_is_not_released_has_a_version_of_its_own():
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    latest, *released = re.findall(r"^## \[(.*?)\]", changelog, re.M)
    if latest == "Unreleased":
        assert re.fullmatch(r"[\d.]+\.dev0", __version__)
        assert __version__.removesuffix(".dev0") not in released
    else:
        assert __version__ == latest
    assert f"\nversion: {__version__}\n" in citation


@needs_mosaic_gpu
@pytest.mark.parametrize("kernel", ["recurrent_fw_H", "parallel_fw_H"])
def test_limits_of_mosaic_gpu(kernel):
    """The widths DHQK in the row of a kernel, and one beyond them."""
    row = re.findall(rf"^\| {kernel}(?:, \w+)? \| DHQK ([^;|]*)", NOTES, re.M)[0]
    widths = [int(x) for x in re.findall(r"\d+", row)]
    for DHQK in (*widths, widths[-1] + 64):
        config = KernelConfig(fused=kernel == "recurrent_fw_H")
        launches = plan((2, 8, 2048, DHQK, 256), backend="mosaic_gpu", config=config).launches
        runs = (kernel, "mosaic_gpu") in [(x.stage, x.lowering) for x in launches]
        assert runs == (DHQK in widths)


def test_versions_of_python_and_jax():
    """Those of the README are the bounds of the package and of the Mosaic GPU kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, version)) for version in MOSAIC_GPU_JAX)
    python, (jax_bounds, jaxlib_bounds) = project["requires-python"], project["dependencies"]
    assert jaxlib_bounds == jax_bounds.replace("jax", "jaxlib")
    least, below = re.fullmatch(r"jax>=([\d.]+),<([\d.]+)", jax_bounds).groups()
    words = " ".join(README.split())
    assert f"Python {python.replace('>=', '>= ')} and jax >= {least}, < {below} are" in words
    assert f"{least} to 0.{int(below.split('.')[1]) - 1};" in words
    assert f"it needs jax >= {first}, hence Python >= 3.12" in words
    assert below == end  # no jax that is accepted is too new for them
    classifiers = [x for x in project["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert f">={classifiers[0].rpartition(' ')[2]}" == python


def test_limits_of_programs():
    """Of the self-check, and of the server that docs/serving.md describes."""
    debugging, serving = (
        " ".join((ROOT / "docs" / f"{name}.md").read_text().split())
        for name in ("debugging", "serving")
    )
    assert f"has no result after {selfcheck.SECONDS} s |" in debugging
    assert f"under {selfcheck.LEAST} calls, none of a function, or more than a tenth" in debugging
    assert selfcheck.MOST_LOST == 1 / 10
    assert "gets four draws of data." in debugging
    assert sorted(map(str, selfcheck.KINDS_OF_DATA)) == ["None", "None", "any size", "cancels"]
    heads = min(selfcheck.HEADS), max(selfcheck.HEADS)
    assert "heads from {} to {},".format(*heads) in debugging
    most, piece = xlstm_server.MOST_STEPS, xlstm_server.PIECES["gpu"]
    assert f"prefills have at most {most:,} steps." in serving
    assert f"of more than {2 * most:,} tokens is read in pieces of {piece} steps" in serving
    assert f"at most {xlstm_server.LONGEST_WAIT} of a loop's time" in serving


# The code blocks of a page, and the cells of a notebook, share their names.
CODE = Sybil([CodeBlockParser(x, PythonEvaluator()) for x in ("python", "ipython3")])
BY_THE_SITE = {"docs/tutorial.md", "docs/examples/byte_lm.md"}  # its build runs them
WITH_CODE = [
    x
    for x in PAGES
    if re.search("^```(python|{code-cell)", (ROOT / x).read_text(), re.M) and x not in BY_THE_SITE
]


@pytest.mark.parametrize("page", [slow(x) if x[5:-3] in SLOW else x for x in WITH_CODE])
def test_the_code_of_a_page_runs(page):
    document = CODE.parse(ROOT / page)
    for example in document.examples():
        example.evaluate()
    if page == "README.md":
        *inputs, gradients = (document.namespace[x] for x in (*"qkvif", "gradients"))
        assert shapes_and_dtypes(gradients) == shapes_and_dtypes(inputs)
    if page == "docs/training.md":
        check_gathers(*(document.namespace[x] for x in ("programs", "state")))
        check_residuals(*(document.namespace[x] for x in ("remat", "Block")))
    if page == "docs/packing.md":
        document.namespace["f"] += 8.0  # so that a window remembers the one before
        check_windows(*(document.namespace[x] for x in ("loss_of_window", *"kvif")))


def check_windows(loss_of_window, *kvif):
    """Windows that go on end with the states of the whole document."""
    (_, S, NH, D), windows, weight = kvif[0].shape, 3, jnp.eye(kvif[0].shape[-1])
    x = jax.random.normal(jax.random.key(9), (windows, 1, S, NH, D))
    states = tuple(jnp.zeros((1, NH, *size)) for size in ((D, D), (D,), ()))
    for window in x:
        _, states = loss_of_window(weight, window, states)
    document = [jnp.concatenate(x, 1), *(jnp.concatenate([y] * windows, 1) for y in kvif)]
    _, expected = mlstm_chunkwise(*document, layout="BTNH", return_last_states=True)
    compare("cnm", states, expected, 1e-5)


def check_residuals(remat, block):
    """With the residuals saved the forward kernels run once, and without them twice."""
    from flax import nnx

    graph, params = nnx.split(block(32, 2, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 64, 32), "float32")

    def launches(loss):
        gradient = jax.grad(lambda params, x: loss(nnx.merge(graph, params), x))
        jaxpr = jax.make_jaxpr(gradient)(params, x).jaxpr
        names = [y.params["name"] for y in equations(jaxpr, "pallas_call")]
        return sum(name in ("parallel_fw_H", "recurrent_fw_H") for name in names)

    assert launches(remat) == 1
    assert launches(nnx.remat(lambda block, x: block(x)[0].sum())) == 2


def check_gathers(programs, state):
    """A weight that is split is gathered once; one of a block once per pass."""
    split = [
        path[0].key
        for path, x in jax.tree.leaves_with_path(state["params"])
        if not x.sharding.is_fully_replicated
    ]
    assert len(split) == 10
    one_device, *others = map(collectives, programs)
    assert not one_device
    for counts in others:
        assert counts == {"all-gather": len(split) + split.count("blocks"), "all-reduce": 2}


PROFILED = {
    "mlstm_chunkwise": dict(),
    "fused": dict(config=KernelConfig(fused=True)),
    "precomputed_chunks": dict(segment_ids=np.zeros((2, 4096), "int32"), num_segments=2),
}


def kernels_of(primitive, function, *x):
    """The names of kernels in the jaxpr of a function on an H200."""
    with jax.sharding.use_abstract_mesh(mesh_for("NVIDIA H200")):
        jaxpr = jax.make_jaxpr(function)(*x).jaxpr
    return {x.params["name"] for x in equations(jaxpr, primitive)}


@pytest.mark.parametrize(
    ("lowering", "primitive", "widths"),
    [
        slow("triton", "pallas_call", [64]),
        pytest.param("mosaic_gpu", "mpmd_map", [128, 256], marks=needs_mosaic_gpu),
    ],
    ids=["triton", "mosaic_gpu"],
)
def test_the_table_of_a_profile_has_the_names_of_the_kernels(lowering, primitive, widths):
    """Of heads of these widths; on Mosaic GPU narrow ones have another stage of gradients. So many
    steps have splits."""
    shape = jax.ShapeDtypeStruct
    gate = shape((2, 4096, 2), "float32")

    def loss(options, *x):
        options = dict(backend=lowering, return_last_states=True, layout="BTNH") | options
        return sum(jnp.sum(y) for y in jax.tree.leaves(mlstm_chunkwise(*x, **options)))

    found = set()
    for width, options in itertools.product(widths, PROFILED.values()):
        q = shape((2, 4096, 2, width), "bfloat16")
        function = jax.grad(functools.partial(loss, options), argnums=range(5))
        found |= kernels_of(primitive, function, q, q, q, gate, gate)
    token = [shape(x.shape[:1] + x.shape[2:], x.dtype) for x in (q, q, q, gate, gate)]
    n = shape((2, 2, width), "float32")
    states = shape((*n.shape, width), "float32"), n, shape((2, 2), "float32")
    rings = jax.eval_shape(functools.partial(mlstm_ring_states, dtype="bfloat16"), *states)
    for step, x in ((mlstm_recurrent_step, states), (mlstm_ring_step, [rings])):
        found |= kernels_of(primitive, functools.partial(step, backend=lowering), *token, *x)
    table = (ROOT / "docs" / "debugging.md").read_text().partition("| Kernel | Triton |")[2]
    table = re.findall(r"^\| ([\w, ]+) \| (yes|no) \| (yes|no) \|", table, re.M)
    names = {n: x for names, *x in table for n in names.split(", ")}
    column = ["triton", "mosaic_gpu"].index(lowering)
    assert found == {name for name, runs in names.items() if runs[column] == "yes"}


def test_the_versions_of_the_training_page_are_there():
    """The page has versions that ran it, of which none is newer than what is installed here."""
    text = (ROOT / "docs" / "training.md").read_text().partition("| Package | Python 3.11 |")[2]
    rows = re.findall(r"^\| ([a-z-]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert {"jax", "flax", "optax", "orbax-checkpoint", "grain"} == {name for name, *_ in rows}

    def numbers(version):
        return [int(x) for x in re.findall(r"\d+", version)]

    for name, *versions in rows:
        version = versions[sys.version_info >= (3, 12)]
        if name == "grain":
            assert f"grain=={version}" in (ROOT / ".ci" / "run").read_text()
        else:
            assert numbers(version) <= numbers(metadata.version(name)), name
    if numbers(metadata.version("flax")) >= [0, 12, 9]:
        assert metadata.metadata("flax")["Requires-Python"] == ">=3.12"


def test_the_api_reference_has_the_public_names():
    assert dir(mlstm_pallas) == sorted(mlstm_pallas.__all__)
    text = "".join(x.read_text() for x in ROOT.glob("docs/api/*.md"))
    names = {x for x in dir(mlstm_pallas) if not x.startswith("_")}
    assert names <= {*re.findall(r"\w+", text)}
