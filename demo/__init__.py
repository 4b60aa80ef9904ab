"""cuLA's demo: prefill a prompt, generate from its state, check every number. ``python -m demo``"""
