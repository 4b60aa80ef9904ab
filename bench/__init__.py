"""cuLA's benchmarks: ``python -m bench <family>`` measures, checks and records one family's calls.

Run from the repository root. Nothing here is part of a wheel.
"""
