"""The adapters of xlstm_jax: values that a hand can check."""

import inspect
import sys

import jax.numpy as jnp
import numpy as np
from oracle import refused

from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5
from mlstm_pallas.xlstm_jax import triton_stablef as stablef


def test_the_generator_gives_the_same_function():
    """The generator gives the same function for the same arguments, and all systems share it. 1
    is no flag, and stays no flag for the cache."""
    generate, get = stablef._mlstm_chunkwise_fwbw_generator, stablef._get_chunkwise_fwbw_kernel
    same = [generate(jnp.bfloat16), generate("bfloat16", False, True, np.int64(64))]
    same += [get("bfloat16", chunk_size=64)]
    for x in (v3, v5, stablef):
        same += [x._mlstm_chunkwise_fwbw_generator(), x._get_chunkwise_fwbw_kernel("bfloat16")]
    assert {*same} == {generate()}
    assert (
        len({generate(x) for x in ("bfloat16", "float32", None)} | {generate(chunk_size=32)}) == 4
    )
    refused(
        TypeError,
        "return_last_states is 1, expected a Python bool",
        lambda: generate(return_last_states=1),
    )


def test_the_systems_share_an_entry(capsys):
    """The systems share an entry under names of their own."""
    entry = stablef.mlstm_chunkwise_triton_stablef
    for other in (
        v3.mlstm_chunkwise_max_triton,
        v5.mlstm_chunkwise_max_triton,
        v5.mlstm_chunkwise__xl_chunk,
    ):
        assert other is getattr(sys.modules[other.__module__], other.__qualname__)
        assert (other.__doc__, inspect.signature(other)) == (
            entry.__doc__,
            inspect.signature(entry),
        )
        try:
            other(*"qkvifcnm", reduce_slicing=True)
        except TypeError as error:
            print(error)
    assert capsys.readouterr().out == (
        "mlstm_chunkwise_max_triton() got an unexpected keyword argument 'reduce_slicing'\n"
        "mlstm_chunkwise_max_triton() got an unexpected keyword argument 'reduce_slicing'\n"
        "mlstm_chunkwise__xl_chunk() got an unexpected keyword argument 'reduce_slicing'\n"
    )
