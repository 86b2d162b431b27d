"""The flags that conftest.py gives XLA: none that may be unknown, as that ends the process."""

from types import SimpleNamespace

import conftest
import pytest


@pytest.mark.parametrize(
    ("jaxlib", "plugins", "known"),
    [
        ("0.10.2", False, True),
        ("0.10.2", True, False),
        ("0.11.2", False, False),
        ("0.11.2", True, False),
        ("0.100.0", False, False),
    ],
    ids=["known", "known_with_plugins", "unknown", "unknown_with_plugins", "unknown_minor_version"],
)
def test_a_flag_that_may_be_unknown_is_not_set(jaxlib, plugins, known):
    assert (conftest.quick_code(jaxlib, plugins) is not None) is known


@pytest.mark.parametrize(
    ("spec", "entry_points", "result"),
    [(None, (), False), (None, ("cuda",), True), ("jax_plugins", (), True)],
    ids=["none", "entry_point", "namespace_package"],
)
def test_plugins_are_found_in_either_place(monkeypatch, spec, entry_points, result):
    monkeypatch.setattr(
        conftest, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: spec))
    )
    monkeypatch.setattr(
        conftest, "metadata", SimpleNamespace(entry_points=lambda group: entry_points)
    )
    assert conftest.plugins_installed() is result
