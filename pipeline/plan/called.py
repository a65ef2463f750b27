"""What messages call the factors of a product, and the product itself."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """What messages call the factors and the product: as the user has given them."""

    a: str = "A"
    b: str = "B"
    c: str = "C"

    def of(self, role: str) -> str:
        """Of ``A`` or ``B``; of anything else that."""
        return {"A": self.a, "B": self.b}.get(role, role)

    @property
    def both(self) -> str:
        """The factors, in words."""
        return self.a if self.a == self.b else f"{self.a} and {self.b}"

    @property
    def either(self) -> str:
        return self.a if self.a == self.b else f"{self.a} or {self.b}"


AS_FACTORS = Names()
"""Where a user gives A, B and C."""
