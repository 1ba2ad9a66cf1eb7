"""Speed, measured beside the bare statements and beside the peers, in one run. `make bench` shows it all.

Machines are noisy: rounds of all contestants are interleaved, and only ratios from one run mean anything.
"""
