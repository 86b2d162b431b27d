"""The order of the stages, forward and backward.

It imports planning/ and below.
"""
