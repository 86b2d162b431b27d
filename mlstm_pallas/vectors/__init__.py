"""Stages without a matrix product: contract, and one body for plain jnp and all lowerings.

A body is a function of vectors and of a ``PrefixScan`` (scan.py), which knows the steps of a chunk.
The file ``vectors.py`` of a lowering launches bodies. It imports formulas/ and below.
"""
