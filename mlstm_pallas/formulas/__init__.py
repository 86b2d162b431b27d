"""The arithmetic that plain forms and kernels share: gates, normaliser, splits, tiles.

It imports problem/.
"""
