"""A matrix product from its request to its published output: placed, walked, kept in a ledger, checked.

What one worker does for a tile is in `worker`, the arithmetic of the plan in `plan`.
"""
