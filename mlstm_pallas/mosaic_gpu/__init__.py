"""The kernels for Hopper GPUs, in Mosaic GPU, one file per stage; common/ has what they share.

It imports stages/ and below.
"""
