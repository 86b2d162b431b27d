"""The documents name files, identifiers and limits that exist; the Python code of each page runs
as it stands."""

import itertools
import re
import tomllib

import jax
import jax.numpy as jnp
import pytest
import xlstm_server
from compile_report import equations
from flax import nnx
from oracle import collectives, compare, for_device, needs_mosaic_gpu, shapes_and_dtypes, slow
from plans import plan
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser
from test_import_graph import PACKAGE

import mlstm_pallas
from mlstm_pallas import (
    KernelConfig,
    __version__,
    mlstm_chunkwise,
    selfcheck,
)
from mlstm_pallas.planning.backend import MOSAIC_GPU_JAX

ROOT = PACKAGE.parent
WORDS: dict[str, set[str]] = {}  # of all files of a name
for x in itertools.chain(*(ROOT.glob(f"{y}/**/*") for y in ("mlstm_pallas", "[tbe]*", "findings"))):
    if x.suffix in (".py", ".sh"):
        WORDS.setdefault(x.name, {x.stem}).update(re.findall(r"\w+", x.read_text()))
# Names of other packages, of variables of the environment, and of an experiment that failed.
FOREIGN = """
store_final_state save_states_every_nth_chunk chunk_size_inter chunk_size_intra async_prefetch
jax_default_matmul_precision _mosaic_gpu_kernel ncclGetPeerDevicePointer shutdown_timeout_seconds
heartbeat_timeout_seconds initialization_timeout http_proxy https_proxy grpc_proxy HTTP_PROXY
max_triton_fwbw_v3 xLSTMBackend parallel_stabilized_simple pack_alignment_struct on_get_value
XLA_CLIENT_MEM_FRACTION get_mlstm_kernel mLSTMBackend xLSTMForCausalLM xLSTMLarge head_first
"""
EVERY = {*FOREIGN.split()}.union(*WORDS.values())
README, NOTES = ((ROOT / name).read_text() for name in ("README.md", "BUILD_NOTES.md"))
SITE = [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = "README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "benchmarks/README.md", *SITE
EXPERIMENTS = [f"mlstm_pallas/{x}/experiments.md" for x in ("triton", "mosaic_gpu")]


def words(page):
    return " ".join((ROOT / page).read_text().split())


def exists(name, page):
    """Whether there is such a file, or such an identifier, of the module if it names one."""
    if re.search(r"/|\.(py|md|toml)$", name):
        return name in WORDS or any((x / name).exists() for x in (ROOT, PACKAGE, page.parent))
    module, _, last = name.rpartition(".")
    return last in WORDS.get(f"{module}.py", EVERY)


@pytest.mark.parametrize("page", [*PAGES, *EXPERIMENTS])
def test_names_exist(page):
    """And the site leaves out no line: MyST takes one that begins with % for a comment."""
    page = ROOT / page
    text = page.read_text()
    assert not re.search(r"^ *%", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    text = text.replace("```", "")
    # Their tables have names of other packages, and they leave out beginnings of names.
    if page.name in ("migrating.md", "xlstm_jax_differences.md"):
        text = re.sub(r"^\|.*|`_\w+`", "", text, flags=re.M)
    if page.name == "debugging.md":  # its table of kernels
        text = re.sub(r"(\w+)(?=[\w, ]* \| (?:yes|no) \| (?:yes|no) \|)", r"`\1`", text)
    names = re.findall(r"`([A-Za-z_.][\w./]*)`|\]\((?!http|#)(.*?)(?:#.*?)?\)", text)
    assert not [a + b for a, b in names if not exists(a or b, page)]


def test_the_api_reference_has_the_public_names():
    assert dir(mlstm_pallas) == sorted(mlstm_pallas.__all__)
    text = "".join(x.read_text() for x in ROOT.glob("docs/api/*.md"))
    assert {x for x in dir(mlstm_pallas) if x[0] != "_"} <= {*re.findall(r"\w+", text)}
    for name in ("distributed", "export", "reference"):  # import * and help() show no other names
        page = (ROOT / f"docs/api/{name}.md").read_text()
        documented = re.findall(r"(?:autofunction:: [\w.]+\.|members: |, )(\w+)", page)
        assert sorted(getattr(mlstm_pallas, name).__all__) == sorted(documented)


def test_versions():
    """Those of Python and jax in the README are the bounds of the package and of the Mosaic GPU
    kernels."""
    latest = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert __version__.endswith(".dev0") if latest == "Unreleased" else __version__ == latest
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, version)) for version in MOSAIC_GPU_JAX)
    python, (jax_bounds, jaxlib_bounds) = project["requires-python"], project["dependencies"]
    assert jaxlib_bounds == jax_bounds.replace("jax", "jaxlib")
    least, below = re.fullmatch(r"jax>=([\d.]+),<([\d.]+)", jax_bounds).groups()
    readme = words("README.md")
    assert f"Python {python.replace('>=', '>= ')} and jax >= {least}, < {below} are" in readme
    assert f"{least} to 0.{int(below.split('.')[1]) - 1};" in readme
    assert f"it needs jax >= {first}, hence Python >= 3.12" in readme
    assert below == end  # no jax that is accepted is too new for them


def test_limits_of_programs():
    """Of the self-check, and of the server that docs/serving.md describes."""
    most = xlstm_server.MOST_STEPS
    limits = dict(
        debugging=[f"has no result after {selfcheck.SECONDS} s |"],
        serving=[
            f"prefills have at most {most:,} steps.",
            f"of more than {2 * most:,} tokens is read in pieces of {xlstm_server.PIECES['gpu']} s",
            f"at most {xlstm_server.LONGEST_WAIT} of a loop's time",
        ],
    )
    for page, texts in limits.items():
        assert not [x for x in texts if x not in words(f"docs/{page}.md")]


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


# ---------------- the code of the pages


# The code blocks of a page, and the cells of a notebook, share their names.
CODE = Sybil([CodeBlockParser(x, PythonEvaluator()) for x in ("python", "ipython3")])
BY_THE_SITE = {"docs/tutorial.md", "docs/examples/byte_lm.md"}  # its build runs them
SLOW = "packing", "serving", "devices", "debugging", "exporting", "training", "bidirectional"
SLOW += "hosts", "examples/xlstm_7b"
WITH_CODE = [
    slow(x) if x[5:-3] in SLOW else x
    for x in PAGES
    if re.search("^```(python|{code-cell)", (ROOT / x).read_text(), re.M) and x not in BY_THE_SITE
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page):
    document = CODE.parse(ROOT / page)
    for example in document.examples():
        example.evaluate()
    names = document.namespace
    if page == "README.md":
        inputs = [names[x] for x in "qkvif"]
        assert shapes_and_dtypes(names["gradients"]) == shapes_and_dtypes(inputs)
    if page == "docs/training.md":
        check_gathers(names["programs"], names["state"])
        check_residuals(names["remat"], names["Block"])
    if page == "docs/packing.md":
        names["f"] += 8.0  # so that a window remembers the one before
        check_windows(*(names[x] for x in ("loss_of_window", *"kvif")))


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
    graph, params = nnx.split(block(32, 2, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 64, 32), "float32")

    def launches(loss):
        gradient = jax.grad(lambda params, x: loss(nnx.merge(graph, params), x))
        with for_device("NVIDIA H200"):
            jaxpr = jax.make_jaxpr(gradient)(params, x).jaxpr
        names = [y.params["name"] for y in equations(jaxpr, "pallas_call")]
        return sum(name in ("parallel_fw_H", "recurrent_fw_H") for name in names)

    assert launches(remat) == 1
    assert launches(nnx.remat(lambda block, x: block(x)[0].sum())) == 2


def check_gathers(programs, state):
    """A weight that is split is gathered once; one of a block once per pass."""
    params = jax.tree.leaves_with_path(state["params"])
    split = [path[0].key for path, x in params if not x.sharding.is_fully_replicated]
    assert len(split) == 10
    one_device, *others = map(collectives, programs)
    assert not one_device
    for counts in others:
        assert counts == {"all-gather": len(split) + split.count("blocks"), "all-reduce": 2}
