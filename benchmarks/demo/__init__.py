"""The whole in one run, on real data with real kills: `python -m benchmarks.demo`, `make demo`."""
