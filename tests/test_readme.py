"""The README's example runs as it stands, and CI finds its test command."""

import re
from pathlib import Path

import jax
from oracle import shapes_and_dtypes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)

    @jax.jit  # one program
    def run():
        names: dict = {}
        exec(compile(example, "README.md", "exec"), names)
        return [names[name] for name in "qkvif"], names["gradients"]

    inputs, gradients = map(shapes_and_dtypes, run())
    assert gradients == inputs


def test_ci_finds_the_test_command():
    joined = re.sub(r"\\\n *", "", README)  # a backslash continues a command
    [command] = re.findall(r"^python3 -m venv .*-m pytest.*$", joined, re.M)
    assert '".[test,benchmark]"' in command
