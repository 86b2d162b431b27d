"""Counts how often `xlstm_7b.py --draft=7` generates other tokens than without drafts.

    python benchmarks/draft_tokens.py --dtype=bfloat16,float32

Each seed is a random model of --size=tiny with a random prompt. A call with drafts has several rows
of activations, so that its sums round differently than those of one token. Tokens differ from the
first one where that changes which logit is the largest. A row of JSON per dtype has the number of
answers that differ, and the median number of equal tokens before the first other one.
"""

import contextlib
import io
import json
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import command
import jax
import numpy as np


def define_flags(define):
    define.names("dtype", ["bfloat16"], ("bfloat16", "float32"), "of the weights.")
    define.integer("seeds", 100, "Models, from seed 0 on.", 1, 2**32 - 1)
    define.integer("draft", 7, "Tokens to draft per call.", 1, 7)
    define.integer("prompt_length", 40, "Tokens per prompt.", 1)
    define.integer("new_tokens", 200, "Tokens per answer.", 1)


def answer(program, options, dtype, draft, seed):
    """Tokens (new_tokens,) of the program with these flags."""
    given = dict(dtype=dtype, draft=draft, seed=seed, prompt_length=options.prompt_length)
    flags = [f"--{name}={value}" for name, value in given.items()]
    program.FLAGS.unparse_flags()
    program.FLAGS(["xlstm_7b", "--random", "--size=tiny", *flags])
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        return np.concatenate([*program.generate(program.build(), options.new_tokens)])[:, 0]


def run(options):
    import xlstm_7b

    for dtype in options.dtype:
        equal = []  # tokens before the first other one, of answers that differ
        for seed in range(options.seeds):
            plain, drafted = (answer(xlstm_7b, options, dtype, n, seed) for n in (0, options.draft))
            if (other := np.flatnonzero(plain != drafted)).size:
                equal.append(int(other[0]))
        row = dict(device=jax.devices()[0].device_kind, jax=jax.__version__, dtype=dtype)
        row |= dict(draft=options.draft, new_tokens=options.new_tokens, answers=options.seeds)
        row |= dict(differ=len(equal), equal_before=statistics.median(equal) if equal else None)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    command.main(define_flags, run)
