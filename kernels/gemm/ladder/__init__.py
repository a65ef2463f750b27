"""The rungs that a reader learns from: each one idea more than the last, for every dtype and every GPU.

No other kernel builds on them; the faster ones are compared with them, and they take what none of those can.
"""
