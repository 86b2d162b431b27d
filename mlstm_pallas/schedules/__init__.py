"""The order of the stages, forward and backward, and the shards on which they run.

It imports planning/ and below.
"""
