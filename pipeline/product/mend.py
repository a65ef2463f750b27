"""The check of a product before it gets its name, and what is done where it fails: bad tiles are found, and computed
once more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import zarr

from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.check.band import verify_band
from tilewright.pipeline.check.locate import wrong_blocks
from tilewright.pipeline.check.pairs import verify_pairs
from tilewright.pipeline.check.verify import Verification, find_damaged, verify_product
from tilewright.pipeline.errors import DamagedProductError
from tilewright.pipeline.events import Listener, Teller
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.product.audit import faults
from tilewright.pipeline.product.ledger import Ledger, Stored
from tilewright.pipeline.product.request import Factors
from tilewright.pipeline.store.objects import object_name

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True)
class Check:
    """A product that is to be checked, as it was planned."""

    client: Client
    factors: Factors
    plan: MatmulPlan
    c: zarr.Array[Any]
    listener: Listener
    counts: zarr.Array[Any] | None = None
    """The numbers of pairs beside C."""

    def run(self) -> Verification:
        """Raises as `verify_product`."""
        factors, grid, band = self.factors, self.plan.tile_grid, self.plan.band
        if factors.fused.pairwise is not None:
            return verify_pairs(
                self.client,
                factors.a,
                factors.b,
                self.c,
                factors.fused,
                factors.sums,
                transposed=factors.transposed,
                precision=factors.precision,
                cuts=(grid.rows.starts(), grid.columns.starts()),
                depth=self.plan.panel_depth,
                listener=self.listener,
                band=band,
                counts=self.counts,
            )
        if band is not None:
            options = self._options
            transposed = options.pop("transpose_a"), options.pop("transpose_b")
            cuts = grid.rows.starts()
            return verify_band(
                self.client, factors.a, factors.b, self.c, band, transposed=transposed, cuts=cuts, **options
            )
        return verify_product(self.client, self.factors.a, self.factors.b, self.c, **self._options)

    def wrong_tiles(self, outcome: Verification) -> set[int]:
        """Those with numbers that are not A times B's. outcome: of `run`. Raises as `verify_product`."""
        plan, grid = self.plan, self.plan.tile_grid
        if plan.band is not None:  # whose rows are compared as a whole
            return {tile for tile, region in self._regions if _share(region, outcome.wrong)}
        if outcome.sampled is not None:  # which names tiles
            return {grid.holding(top, left) for top, _, left, _ in outcome.wrong}
        # Tiles that were cut from larger ones do not lie at multiples of their sides, but consist of stored pieces.
        side = plan.c_unit if plan.within else (plan.tile_rows, plan.tile_columns)
        found = wrong_blocks(self.client, self.factors.a, self.factors.b, self.c, side, **self._options)
        return {grid.holding(top, left) for top, _, left, _ in found.wrong}

    def undecodable_tiles(self) -> set[int]:
        regions = self._regions
        places = find_damaged(self.client, self.c, (region for _, region in regions), listener=self.listener)
        return {regions[place][0] for place in places}

    @property
    def _regions(self) -> list[tuple[int, tuple[slice, slice]]]:
        """Each region of C, with its tile; in a symmetric C most tiles have two."""
        return [(tile.index, region) for tile in self.plan.tiles() for region in self.plan.regions(tile)]

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "transpose_a": self.factors.transposed[0],
            "transpose_b": self.factors.transposed[1],
            "rounds": config.get("verify-rounds"),
            "precision": self.factors.precision,
            "fused": self.factors.fused,
            "sums": self.factors.sums,
            "before": self.factors.before,
            "listener": self.listener,
        }


def _share(region: tuple[slice, slice], blocks: Iterable[tuple[int, int, int, int]]) -> bool:
    """Whether a region has any element in common with these blocks, each its first and last + 1 row and column."""
    rows, columns = region
    return any(
        rows.start < bottom and top < rows.stop and columns.start < right and left < columns.stop
        for top, bottom, left, right in blocks
    )


def mended(
    check: Check,
    ledger: Ledger,
    again: Callable[[Collection[int]], object],
    check_inputs_stayed: Callable[[], None],
    tell: Teller,
) -> Verification:
    """The outcome of the check; where it fails, of a second one, after the tiles that are bad were computed once more.

    again: withdraws these tiles, and computes them. check_inputs_stayed: raises where A or B is not what it was.

    Raises DamagedProductError where chunks of C cannot be decoded, the second time too.
    """
    outcome = _outcome(check)
    if not _is_bad(outcome):
        return _raised(outcome)
    check_inputs_stayed()
    bad, why = _bad_tiles(check, ledger, outcome)
    if not bad:
        return _raised(outcome)
    count = counted(check.plan.tile_count, "tile")
    tell.warn(f"{outcome}; {len(bad)} of {count} {_are(bad)} bad ({why}) and {_are(bad)} computed once more")
    again(bad)
    outcome = _outcome(check)
    if not _is_bad(outcome):
        return _raised(outcome)
    check_inputs_stayed()
    cause = (
        f"{counted(len(bad), 'bad tile')} had been computed a second time, from inputs that did not change: suspect the"
        " memory, the disk or the GPU of these hosts"
    )
    if isinstance(outcome, DamagedProductError):
        raise DamagedProductError(f"{outcome}; {cause}") from outcome
    return replace(outcome, cause="; ".join(filter(None, [outcome.cause, cause])))


def _are(tiles: Collection[int]) -> str:
    return "is" if len(tiles) == 1 else "are"


def _outcome(check: Check) -> Verification | DamagedProductError:
    try:
        return check.run()
    except DamagedProductError as error:
        return error


def _is_bad(outcome: Verification | DamagedProductError) -> bool:
    return isinstance(outcome, DamagedProductError) or (outcome.conclusive and not outcome.passed)


def _raised(outcome: Verification | DamagedProductError) -> Verification:
    if isinstance(outcome, DamagedProductError):
        raise outcome
    return outcome


def _stored(check: Check, ledger: Ledger) -> Iterator[tuple[zarr.Array[Any], Mapping[int, Stored]]]:
    """What tiles have stored, and where."""
    yield check.c, ledger.tiles
    if check.counts is not None:
        yield check.counts, {index: Stored(stored.counts) for index, stored in ledger.tiles.items()}


def _bad_tiles(
    check: Check, ledger: Ledger, outcome: Verification | DamagedProductError
) -> tuple[set[int], str]:
    """The tiles that are not what they should be, and why, in words: those whose bytes are not what was written; or if
    all are, those that cannot be decoded, or are no part of the product."""
    for array, tiles in _stored(check, ledger):
        if found := faults(array, tiles, check.listener, whole=True):
            _, stored, reason = found[0]
            return {tile for tile, _, _ in found}, f"{object_name(array, stored.place)}: {reason}"
    if isinstance(outcome, DamagedProductError):
        return check.undecodable_tiles(), "they cannot be decoded, but hold the bytes that were written"
    return check.wrong_tiles(outcome), "they hold the bytes that were written, and wrong numbers"
