"""Records among the operands of several stages: lists of chunks, and rows with weights.

It imports formulas/ and below.
"""
