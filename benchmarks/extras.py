"""A program without one of its packages ends with a line that says what to install.

``command.py`` imports this before anything that may be missing.
"""

import os
import sys
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
