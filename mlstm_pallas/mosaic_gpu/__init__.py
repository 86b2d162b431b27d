"""The kernels for Mosaic GPU, one file per stage; common/ has what they share.

It imports stages/ and below.
"""
