"""The arithmetic that plain forms and kernels share: gates, normaliser, splits, lists of chunks.

It imports problem/.
"""
