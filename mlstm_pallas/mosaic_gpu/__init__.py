"""The kernels for Mosaic GPU, one file per stage, and the parts that they share.

It imports stages/ and below.
"""
