"""How a stage runs: its lowering, its launch and the tiles of its kernel.

It imports formulas/ and below.
"""
