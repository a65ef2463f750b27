"""What eigenpairs and EOFs come back as."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.plan.product import MatmulPlan

SHOWN = 20
"""Pairs that are printed."""


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """The leading eigenvalues and vectors of a Hermitian matrix G."""

    values: np.ndarray
    """k, descending; float64."""
    vectors: np.ndarray
    """n × k, orthonormal, each with its largest component positive; float64 or complex128."""
    residuals: np.ndarray
    """‖G v - λ v‖ of each."""
    passes: int
    """Over G."""
    seconds: float
    read_nbytes: int
    dtype: str
    """What G was multiplied in."""
    device: str
    """Name of the GPU, or ``CPU``."""

    @property
    def side(self) -> int:
        """Of G."""
        return len(self.vectors)

    def to_json(self) -> dict[str, object]:
        """Without the vectors, which are as long as G."""
        return {
            "values": self.values.tolist(),
            "residuals": self.residuals.tolist(),
            "side": self.side,
            "passes": self.passes,
            "seconds": self.seconds,
            "read_nbytes": self.read_nbytes,
            "dtype": self.dtype,
            "device": self.device,
        }

    def __str__(self) -> str:
        rows = zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        head = f"{counted(len(self.values), 'eigenpair')} of {self.side} × {self.side}"
        head += f" in {self.seconds:.2f} s on {self.device} (multiplied as {self.dtype})"
        passes = f"passes over G: {self.passes}, read {format_nbytes(self.read_nbytes)}"
        return "\n".join([head, passes, *_table(("eigenvalue", "residual"), rows)])


@dataclass(frozen=True, eq=False)
class EofRun:
    """EOFs that were computed and stored."""

    out: str
    """The group that holds them."""
    values: np.ndarray
    """Eigenvalues of the covariance matrix, descending: the variance that each EOF explains."""
    ratios: np.ndarray
    """The same as shares of the total variance."""
    residuals: np.ndarray
    """‖C v - λ v‖ of each, C being the covariance matrix."""
    total_variance: float
    samples: int
    variables: int
    passes: int
    """Over X: one to find means and variances, two for each step of the iteration, and those that find scores."""
    seconds: float
    read_nbytes: int
    dtype: str
    """What X was multiplied in."""
    device: str
    """Name of the GPU, or ``CPU``."""
    verification: Verification | None
    """Of the scores, which are X times the EOFs; None where none was asked for."""
    resumed: int = 0
    """Of the passes, those that an earlier run had made."""

    def to_json(self) -> dict[str, object]:
        found = asdict(self)
        for name in ("values", "ratios", "residuals"):
            found[name] = found[name].tolist()
        return found | {
            "verification": self.verification.to_json() if self.verification is not None else None
        }

    def __str__(self) -> str:
        count = len(self.values)
        rows = zip(self.values.tolist(), self.ratios.tolist(), self.residuals.tolist(), strict=True)
        sides = f"{counted(self.samples, 'sample')} × {counted(self.variables, 'variable')}"
        head = f"{counted(count, 'EOF')} of {sides} in {self.seconds:.2f} s on {self.device}"
        earlier = f" ({self.resumed} of an earlier run)" if self.resumed else ""
        passes = (
            f"passes over X: {self.passes}{earlier}, read {format_nbytes(self.read_nbytes)}; total variance"
        )
        lines = [
            f"{head} (multiplied as {self.dtype})",
            f"{passes} {self.total_variance:.6g}, of which {self.ratios.sum():.2%} is explained",
            *_table(
                ("variance", "share", "residual"),
                ((value, f"{ratio:.2%}", residual) for value, ratio, residual in rows),
            ),
        ]
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Eofs:
    """EOFs that were computed and are returned, as arrays that are named as those of the group that a run stores."""

    components: np.ndarray
    """k × variables, each EOF of length 1 with its largest component positive."""
    scores: np.ndarray
    """samples × k."""
    eigenvalues: np.ndarray
    """Of the covariance matrix, descending: the variance that each EOF explains."""
    explained_variance_ratio: np.ndarray
    """The same as shares of the total variance."""
    singular_values: np.ndarray
    residuals: np.ndarray
    """‖C v - λ v‖ of each, C being the covariance matrix."""
    run: EofRun
    """How they were found; its ``out`` is empty."""
    mean: np.ndarray | None = None
    """Of each variable, where means were subtracted."""
    factor: np.ndarray | None = None
    """What each variable was multiplied by after that, where variables were scaled or weighted."""

    def to_json(self) -> dict[str, object]:
        """The run's, without arrays that are as long as X."""
        return self.run.to_json()

    def __str__(self) -> str:
        return str(self.run)


@dataclass(frozen=True)
class EofPlan:
    """How EOFs would be found."""

    samples: int
    variables: int
    k: int
    method: str
    """``krylov`` or ``gram``."""
    side: str
    """``samples`` or ``variables``: whose eigenvectors are found, which is the shorter one."""
    least_passes: int
    """Over X."""
    most_passes: int
    pass_nbytes: int
    """Of X, which a pass reads at least once."""
    output_nbytes: int
    """Of EOFs and scores."""
    dtype: str
    """What X is multiplied in."""
    products: dict[str, MatmulPlan]
    """Of X, by what it is multiplied by; those of a step of the iteration are made again and again."""

    def to_json(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "products"}
        return own | {"products": {name: plan.to_json() for name, plan in self.products.items()}}

    def __str__(self) -> str:
        passes = f"{self.least_passes}"
        if self.most_passes != self.least_passes:
            passes += f" to {self.most_passes}, as soon as residuals are small enough"
        sides = f"{counted(self.samples, 'sample')} × {counted(self.variables, 'variable')}"
        how = f"by {self.method} on the side of the {self.side} (multiplied as {self.dtype})"
        lines = [
            f"{counted(self.k, 'EOF')} of {sides}, {how}",
            f"passes over X: {passes}; each reads {format_nbytes(self.pass_nbytes)} at least",
        ]
        for name, plan in self.products.items():
            lines += ["", f"X by {name}:" if name != "scores" else "scores:", str(plan)]
        return "\n".join(lines)


def _table(names: tuple[str, ...], rows: Any) -> list[str]:
    """Lines of a table of numbers, one a pair."""
    rows = list(rows)
    lines = ["  " + "".join(f"{name:>14}" for name in ("", *names))]
    for number, row in enumerate(rows[:SHOWN], 1):
        cells = (cell if isinstance(cell, str) else f"{cell:.6g}" for cell in row)
        lines.append("  " + "".join(f"{cell:>14}" for cell in (str(number), *cells)))
    if len(rows) > SHOWN:
        lines.append(f"  ... and {len(rows) - SHOWN} more")
    return lines
