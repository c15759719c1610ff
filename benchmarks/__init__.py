"""Benchmark scripts for developers, each a command, such as `python -m benchmarks.load`.

They print ratios where possible, because absolute times vary on a shared machine. Not part of the package.
"""
