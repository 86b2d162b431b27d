"""The kernels in Triton, one file per stage, and launch.py, which calls Pallas.

It imports stages/ and below.
"""
