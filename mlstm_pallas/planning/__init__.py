"""What runs: the options and the CallSpec of a call, its plan, backends, lowerings and costs.

It imports stages/ and below; dispatch.py imports the folder of a lowering when a plan asks for it.
"""
