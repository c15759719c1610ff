"""Parts of `benchmarks.compare`: checkouts, child processes, probes and intervals.

Nothing here imports exlm: each checkout is measured by processes that import its own copy.
"""
