"""What tokens of the CPU are counted with: tables with open addressing, and keys sorted by their digits.

The loops that find tokens, and what they count as, are in the folder above.
"""
