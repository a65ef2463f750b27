"""The rungs that a reader learns from: each one idea more than the last. The first two take every dtype
and run everywhere, the simulator included; the third takes 32-bit elements and needs PTX.

No other kernel builds on them; the faster ones are compared with them, and they take what none of those can.
"""
