"""Measurements of exlm on this machine, each a command: `python -m benchmarks.load`.

They print ratios where they can: a shared machine's seconds mean little. Nothing here is part of the package.
"""
