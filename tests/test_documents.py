"""The documents name files, identifiers and limits that exist; the README's example runs as it
stands, and CI finds its test command."""

import itertools
import re

import jax
import pytest
from oracle import needs_mosaic_gpu, shapes_and_dtypes
from test_import_graph import LAYER, PACKAGE

from mlstm_pallas import KernelConfig, __version__, plan

ROOT = PACKAGE.parent
FILES = [x for y in ("mlstm_pallas", "[tbe]*") for x in ROOT.glob(f"{y}/**/*.py")]
WORDS = {x.name: {x.stem, *re.findall(r"\w+", x.read_text())} for x in FILES}
# Names of jax, of LLVM, and of an experiment that failed.
FOREIGN = {"async_prefetch", "barrier_arrive", "ClusterBarrier", "maxnumf", "operand_maps", "pth"}
README, NOTES = ((ROOT / name).read_text() for name in ("README.md", "BUILD_NOTES.md"))
PAGES = "README.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "docs/kernels.md", "docs/arguments.md"
PAGES += "docs/failed_experiments.md", "benchmarks/README.md"


def exists(name, page):
    """Whether there is such a file, or such an identifier, of the module if it names one."""
    if re.search(r"/|\.(py|md|toml)$", name):
        return name in WORDS or any((x / name).exists() for x in (ROOT, PACKAGE, page.parent))
    module, _, last = name.rpartition(".")
    return last in (WORDS.get(f"{module}.py") or FOREIGN.union(*WORDS.values()))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    page = ROOT / page
    text = page.read_text().replace("```", "")
    names = re.findall(r"`([A-Za-z_.][\w./]*)`|\]\((?!http)(.*?)\)", text)
    assert not [a + b for a, b in names if not exists(a or b, page)]


def test_the_file_map_names_every_file():
    block = README.rpartition("## Files")[2].rpartition("```")[0]
    files = {x.name + "/" * x.is_dir() for x in PACKAGE.glob("[a-z]*")} - {"py.typed", "tuning/"}
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
        launches = plan(
            B=2,
            NH=8,
            S=2048,
            DHQK=DHQK,
            DHV=256,
            gpu="NVIDIA H200",
            backend="mosaic_gpu",
            config=KernelConfig(fused=kernel == "recurrent_fw_H"),
        ).launches
        runs = (kernel, "mosaic_gpu") in [(x.stage, x.lowering) for x in launches]
        assert runs == (DHQK in widths)


def of_example(text, *names):
    """What the one example of a page calls so."""
    [example] = re.findall(r"```python\n(.*?)```", text, re.S)

    @jax.jit  # one program
    def run():
        variables: dict = {}
        exec(compile(example, "example", "exec"), variables)
        return [variables[name] for name in names]

    return run()


def test_the_example_of_the_readme_runs():
    *inputs, gradients = of_example(README, *"qkvif", "gradients")
    assert shapes_and_dtypes(gradients) == shapes_and_dtypes(inputs)


def test_ci_finds_the_test_command():
    joined = re.sub(r"\\\n *", "", README)  # a backslash continues a command
    [command] = re.findall(r"^python3 -m venv .*-m pytest.*$", joined, re.M)
    assert '".[test,benchmark]"' in command
