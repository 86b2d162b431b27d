"""The README's example runs as it stands, and its links exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    for argument, gradient in zip("qkvif", names["gradients"], strict=True):
        assert gradient.shape == names[argument].shape
        assert gradient.dtype == names[argument].dtype


def test_the_links_lead_somewhere():
    assert not [
        target
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README)
        if not (ROOT / target).exists()
    ]


def test_ci_finds_the_test_command():
    joined = re.sub(r"\\\n *", "", README)  # a backslash continues a command
    [command] = re.findall(r"^python3 -m venv .*-m pytest.*$", joined, re.M)
    assert '".[test,benchmark]"' in command
