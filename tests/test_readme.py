"""The README's example runs as it stands, and names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    for argument, gradient in zip("qkvif", names["gradients"], strict=True):
        assert gradient.shape == names[argument].shape
        assert gradient.dtype == names[argument].dtype


def test_the_files_exist():
    for name in re.findall(r"^\| `([^`]+)`", README, re.M):
        assert (ROOT / name).exists(), name


def test_ci_finds_the_test_command():
    [command] = re.findall(r"^python3 -m venv .*-m pytest.*$", README, re.M)
    assert '"[test,benchmark]"' in command.replace(".[", "[")
