"""examples/step_programs.py: the two halves of a derivative, and programs kept in a file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_programs
from jax.ad_checkpoint import checkpoint_name

KEY = step_programs.facts([])


def layer(params, x):
    return jnp.tanh(checkpoint_name(x @ params["in"], "h")) @ params["out"]


def inputs(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (8, 16), (16, 8), (4, 8), (4, 8)
    into, out, x, gradient = map(jax.random.normal, keys, shapes)
    return ({"in": into, "out": out}, x), gradient


@pytest.mark.parametrize(
    ("policy", "saved_shapes"),
    [
        (jax.checkpoint_policies.save_only_these_names("h"), [(4, 16)]),
        (jax.checkpoint_policies.nothing_saveable, []),
    ],
)
def test_halves_are_the_derivative_and_save_what_the_policy_says(policy, saved_shapes):
    function = jax.checkpoint(layer, policy=policy)
    arguments, gradient = inputs()
    forward, backward = step_programs.halves(function)
    y, saved = jax.jit(forward)(*arguments)
    assert [x.shape for x in saved] == saved_shapes
    expected, pullback = jax.vjp(function, *arguments)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    found = jax.jit(backward)(arguments, saved, gradient)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, pullback(gradient)
    )
    products = jax.jit(backward).lower(arguments, saved, gradient).as_text().count("dot_general")
    assert products == (4 if saved else 5)  # of four gradients; the forward pass is not in it


def programs(path, key, calls=None):
    arguments, gradient = inputs()
    forward, backward = map(jax.jit, step_programs.halves(layer))
    _, saved = jax.eval_shape(forward, *arguments)

    def default():
        return dict(forward=(forward, arguments), backward=(backward, (arguments, saved, gradient)))

    return step_programs.compiled(calls or default, path, key)


def test_a_file_starts_programs_without_a_trace(tmp_path, capsys):
    path = tmp_path / "programs"
    first = programs(path, KEY)
    again = programs(path, KEY, calls=lambda: pytest.fail("traced"))
    arguments, gradient = inputs(1)
    for call in first, again:
        _, saved = call["forward"](*arguments)
        found = call["backward"](arguments, saved, gradient)
    expected = jax.vjp(layer, *arguments)[1](gradient)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)
    assert (capsys.readouterr().err, [*tmp_path.iterdir()]) == ("", [path])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(jax="0.0.1"), "jax"),
        (dict(device="1 NVIDIA H100", code="0"), "device, code"),
        (dict(tokens="8 x 64"), "tokens"),
    ],
)
def test_programs_of_something_else_are_compiled_again(change, named, tmp_path, capsys):
    path = tmp_path / "programs"
    programs(path, KEY | change)
    traced = []
    programs(path, KEY, calls=lambda: traced.append(1) or {})
    assert traced
    assert capsys.readouterr().err == f"{path} has programs of another {named}\n"
    programs(path, KEY, calls=lambda: pytest.fail("traced"))


def test_code_and_variables_are_facts(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text("width = 8\n")
    first = step_programs.facts([tmp_path])
    (tmp_path / "model.py").write_text("width = 9\n")
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "xla")
    second = step_programs.facts([tmp_path])
    assert [x for x in first if first[x] != second[x]] == ["variables", "code"]
