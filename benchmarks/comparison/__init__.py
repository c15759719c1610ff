"""The parts of `benchmarks.compare`: checkouts, child processes and what they measure, intervals.

Nothing here imports exlm: each checkout is measured by processes that import its own copy.
"""
