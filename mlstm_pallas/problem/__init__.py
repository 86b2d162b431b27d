"""What a call is about: dimensions, arrays, GPUs, and the checks of arguments.

It imports nothing of the package.
"""
