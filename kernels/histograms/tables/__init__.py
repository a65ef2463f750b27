"""What tokens are counted with: tables with open addressing, of CPUs and of GPUs, and keys sorted by their digits.

The loops and kernels that find tokens, and what they count as, are in the folder above.
"""
