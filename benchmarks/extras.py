"""A program without one of its packages ends with a line that says what to install, one on several
GPUs has the flag of XLA that it needs, and none needs a display.

``command.py`` imports this before anything that may be missing, and before JAX starts.
"""

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

BENCHMARK, EXAMPLES = (f"'mlstm_pallas[{extra}]'" for extra in ("benchmark", "examples"))
PEERS = "torch transformers xlstm==2.0.6 mlstm_kernels==2.0.6"
PACKAGES = {  # what to install, by the module that is missing
    **dict.fromkeys(("absl", "flax", "matplotlib", "optax", "orbax", "tqdm"), BENCHMARK),
    **dict.fromkeys(("safetensors", "tokenizers", "yaml"), EXAMPLES),
    **dict.fromkeys(("torch", "transformers"), PEERS),
    **dict.fromkeys(("libcst", "mutmut"), "mutmut"),
}


def end(kind, error, traceback):
    """In place of a traceback; exit code 2. --help shows the docstring before."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if not (packages := PACKAGES.get(missing.partition(".")[0])):
        return sys.__excepthook__(kind, error, traceback)
    if asks := "--help" in sys.argv:
        print(sys.modules["__main__"].__doc__)
    program = Path(sys.argv[0]).stem
    if program in ("xlstm_7b", "draft_tokens"):  # whose extra has all that they need
        packages = EXAMPLES
    print(f"{program}: {missing} is missing: pip install {packages}", file=sys.stderr)
    sys.exit(0 if asks else 2)


sys.excepthook = end
# The programs draw to files. The environment may name the backend of a notebook, whose package need
# not be installed; then matplotlib cannot be imported. A notebook itself keeps its backend.
if "ipykernel" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"

# All-reduces of a few floats between GPUs fail in XLA's one-shot kernel (docs/devices.md).
NO_ONE_SHOT = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"


def has_plugins():
    """Whether JAX finds plugins, in the two places where it looks for them."""
    places = importlib.util.find_spec("jax_plugins"), metadata.entry_points(group="jax_plugins")
    return any(places)


def flags_of_gpus(jaxlib, plugins, gpus):
    """XLA's flags for a version, with plugins or not, beside so many GPUs.

    XLA ends the process at a flag that it does not know, so they are for versions that were tried.
    A GPU plugin has its own XLA.
    """
    return [NO_ONE_SHOT] if jaxlib.startswith("0.12.") and plugins and gpus > 1 else []


def add_flags(environ, added):
    """Adds those flags to XLA_FLAGS that it does not have; none if it is empty."""
    flags = environ.get("XLA_FLAGS", " ")
    added = [x for x in added if x.partition("=")[0] not in flags]
    if flags and added:
        environ["XLA_FLAGS"] = " ".join([*added, flags])


if (gpus := len([*Path("/dev").glob("nvidia[0-9]*")])) > 1:
    add_flags(os.environ, flags_of_gpus(metadata.version("jaxlib"), has_plugins(), gpus))
