"""The examples: values that a hand can check."""

import dataclasses
import json
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_checkpoint as checkpoint
import xlstm_model as model
import xlstm_server as server
from oracle import refused


def rings(platform):
    with mock.patch("jax.default_backend", return_value=platform):
        return [*map(model.rings_are_faster, (1, 15, 16, 64))]


def ffn_dim(name, text):
    with tempfile.TemporaryDirectory() as folder:
        _ = Path(folder, name).write_text(text)
        return checkpoint.read_config(Path(folder))[0].ffn_dim


def check(free, config, dtype, devices, *prompts):
    tensors = checkpoint.tensors_of(config, dtype, devices)
    with mock.patch.object(checkpoint, "free_bytes", return_value=free):
        checkpoint.check_prompts(config, tensors, dict(enumerate(prompts)))


def draws(temperature, top_p, *expected):
    logits = jnp.log(jnp.tile(jnp.array([0.05, 0.6, 0.05, 0.3]), (2500, 1)))
    sampling, each = model.Sampling(temperature, top_p), np.arange(2500)
    drawn = model.sample(sampling, logits, jax.random.key(0), each)
    expected = np.array(expected) / sum(expected)
    off = abs(np.bincount(drawn, minlength=4) / 2500 - expected)
    return bool(np.all(off <= np.where(expected % 1 > 0, 3 * 0.5 / 50, 1e-9)))


x, vector = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 256), (5,)))
readers = [checkpoint.random_tensors(seed) for seed in (3, 3, 4)]


def test_steps_of_prefills_for_so_many_tokens():
    """Steps of prefills, for so many tokens."""
    assert [*map(server.bucket, (1, 256, 257, 385, 513, 4000, 5000, 6145))] == [
        256,
        256,
        384,
        512,
        768,
        4096,
        6144,
        8192,
    ]


def test_tokens_of_a_config():
    """Tokens of a config: None, a number or a list."""
    check_ids = checkpoint.check_ids
    assert [
        check_ids(checkpoint.Config(vocab_size=5), "eos_token_id", x) for x in (None, 0, [], [3, 4])
    ] == [[], [0], [], [3, 4]]
    refused(
        checkpoint.CheckpointError,
        "eos_token_id: 5 is no token, an integer from 0 to 4",
        lambda: check_ids(checkpoint.Config(vocab_size=5), "eos_token_id", [3, 5]),
    )


def test_rings_are_for_many_prompts_on_a_gpu():
    """Rings are for many prompts on a GPU."""
    assert (rings("gpu"), rings("cpu"), rings("tpu")) == (
        [False, False, True, True],
        [False, False, False, False],
        [False, False, False, False],
    )


def test_the_fullest_device_decides_what_is_free():
    """The fullest device decides what is free; devices that do not say have room."""
    stats = dict(bytes_limit=10, bytes_in_use=3), None, dict(bytes_limit=9, bytes_in_use=5)
    devices = [mock.Mock(memory_stats=lambda x=x: x) for x in stats]
    assert (
        repr(
            [checkpoint.free_bytes(mock.Mock(devices=np.array(x))) for x in (devices, devices[1:2])]
        )
        == "[4, inf]"
    )


def test_devices_divide_the_model():
    """Devices divide the model."""
    config = checkpoint.Config(hidden_size=64, num_heads=4, vocab_size=128)
    refused(
        checkpoint.CheckpointError,
        "--devices=2 do not divide ffn_dim, 65",
        lambda: checkpoint.mesh_of(
            dataclasses.replace(config, ffn_proj_factor=65 / 64, ffn_round_up_to_multiple_of=1), 2
        ),
    )
    refused(
        checkpoint.CheckpointError,
        "--devices=2 do not divide vocab_size, 127",
        lambda: checkpoint.mesh_of(dataclasses.replace(config, vocab_size=127), 2),
    )


def test_the_default_width_of_the_feed_forward():
    """The width of the feed-forward by default: xlstm's factor is 2.6667 and transformers'
    2.667."""
    assert ffn_dim("config.yaml", "embedding_dim: 9600\nffn_round_up_to_multiple_of: 1\n") == 25600
    assert (
        ffn_dim("config.json", json.dumps(dict(hidden_size=9600, ffn_round_up_to_multiple_of=1)))
        == 25603
    )


def test_prompts_fit_to_the_byte(capsys):
    """Prompts fit to the byte: norms and the biases of gates are float32, and m is."""
    tiny, _ = checkpoint.read_config(
        Path(checkpoint.__file__).parents[1] / "tests" / "programs" / "xlstm_7b"
    )
    big = checkpoint.Config()
    smaller = dataclasses.replace(big, inference_state_dtype="bfloat16")
    for needed, *call in (
        (283_968, tiny, "float32", 2),
        (14_002_060_672, big, "bfloat16", 1),
        (13_867_580_800, smaller, "bfloat16", 1),
    ):
        largest = call[0].vocab_size - 1
        check(needed, *call, [1], [largest, 0])
        for free, prompt in (needed - 1, [largest, 0]), (needed, [0, largest + 1]):
            try:
                check(free, *call, [1], prompt)
            except checkpoint.CheckpointError as error:
                print(str(error).partition(" (")[0])
    assert capsys.readouterr().out == (
        "needs 0.00 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
        "needs 13.04 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
        "needs 12.92 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
    )


def test_random_weights_differ_and_have_the_usual_scale():
    """Random weights differ and have the usual scale: the mean square of n values has a standard
    deviation of (2 / n)^0.5."""
    first, again, other = (read("", x) for read in readers)
    assert [bool(jnp.array_equal(first, y)) for y in (again, other, readers[0]("", x))] == [
        True,
        False,
        False,
    ]
    assert bool(abs(jnp.mean(first * first) * 256 - 1) < 5 * (2 / x.size) ** 0.5)
    assert readers[0]("", vector).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0]


def test_weights_of_the_first_and_last_seeds_differ():
    """So do those of the last seed and the first ones."""
    seeds = 0, 1, 2**32 - 1
    some = [y for read in map(checkpoint.random_tensors, seeds) for y in (read("", x), read("", x))]
    assert len({float(y[0, 0]) for y in some}) == 6


def test_tokens_are_drawn_from_the_likeliest():
    """Tokens are drawn from the fewest likeliest ones that have the mass top_p; of equal ones,
    from the first. Sums that reach top_p exactly do so in float32 as well. Within three
    standard deviations of the share of a token in 2500 draws:"""
    assert (
        draws(1.0, 1.0, 1, 12, 1, 6),
        draws(0.5, 1.0, 1, 144, 1, 36),
        draws(1.0, 0.95, 1, 12, 0, 6),
    ) == (True, True, True)
    assert (
        draws(1.0, 0.9, 0, 2, 0, 1),
        draws(1.0, 0.0, 0, 1, 0, 0),
        draws(0.0, 1.0, 0, 1, 0, 0),
    ) == (True, True, True)
    assert (draws(1e-30, 1.0, 0, 1, 0, 0), draws(1e30, 1.0, 1, 1, 1, 1)) == (True, True)


@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.0])
def test_temperatures_at_the_ends_of_their_range(top_p):
    """The least ones, which float32 flushes or cannot divide by, take the likeliest token, also of
    logits whose difference is infinite. Logits that are NaN or inf have none, in their row alone;
    one of -inf has the mass 0."""
    largest, inf = float(jnp.finfo("float32").max), jnp.inf
    rows = [1, 5, 30, -3], [0, 1 - 2**-24, 1, 0.5], [-largest, 1, largest, 2], [-inf, 0, 1, -inf]
    logits = jnp.array([*rows, [1, jnp.nan, 2, 3], [inf, 1, 2, 3]])
    for temperature in (0.0, 5e-324, 1e-40, 1e-38, 1.2e-38, 1e-30):
        sampling = model.Sampling(temperature, top_p)
        tokens = model.sample(sampling, logits, jax.random.key(0), np.arange(6))
        assert tokens.tolist() == [2, 2, 2, 2, model.NO_TOKEN, model.NO_TOKEN], temperature
    for temperature in (1e38, 1e39, np.inf):
        sampling = model.Sampling(temperature)
        tokens = model.sample(sampling, jnp.tile(logits[:1], (400, 1)), jax.random.key(0), 0)
        many = model.sample(
            sampling, jnp.tile(logits[:1], (400, 1)), jax.random.key(0), np.arange(400)
        )
        assert {*np.asarray(tokens).tolist()} <= {*np.asarray(many).tolist()} == {0, 1, 2, 3}


def test_the_first_that_is_not_finite_is_named():
    """A weight, else the block whose output or states are, else the logits."""
    config = model.Config(vocab_size=8, hidden_size=16, num_blocks=2, num_heads=1)
    tensors = checkpoint.tensors_of(config, "float32", 1)
    params = checkpoint.load(config, tensors, checkpoint.random_tensors(0))
    first, second = params["blocks"]
    huge = second | dict(down=second["down"].at[3].set(3e38))
    bad = first | dict(up=first["up"].at[0, 0, 0].set(-jnp.inf))

    def named(tokens=(1, 2, 3), **changed):
        return model.first_not_finite(config, params | changed, [*tokens])

    assert named() == "the logits"
    assert named(blocks=[first, huge]) == "block 1 of 2"
    assert named(blocks=[bad, huge]) == "blocks.0.up"
    with mock.patch.object(model, "MOST_STEPS", 2):
        assert named() == "the logits"
        assert named(blocks=[first, huge]) == "block 1 of 2"
    block = "backbone.blocks.1.ffn.proj_down.weight"

    def read(name, x):
        return np.full(x.shape, np.finfo("float32").max if name == block else 0, "float32")

    message = f"{block} has values that are not finite in bfloat16"
    tensors = checkpoint.tensors_of(config, "bfloat16", 1)
    refused(checkpoint.CheckpointError, message, lambda: checkpoint.load(config, tensors, read))
