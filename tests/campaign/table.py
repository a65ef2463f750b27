"""The results of a campaign: one JSON file, a summary to read, and the command that repeats a case."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def repeat_command(case: Case) -> str:
    change = f" --change {case['change']}" if case.get("change") else ""
    return f"{Path(sys.executable).name} -m tests.campaign --{case['kind']} 1 --seed {case['seed']}{change}"


def write(path: Path, cases: Sequence[Case], facts: Case) -> None:
    path.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")


def summary(cases: Iterable[Case]) -> str:
    kinds = defaultdict[str, list[Case]](list)
    for case in cases:
        kinds[case["kind"]].append(case)
    texts = [SUMMARIES[kind](found) for kind, found in kinds.items()]
    broken = [case for found in kinds.values() for case in found if case["broken"]]
    for case in broken:
        texts.append(f"BROKEN, repeat with: {repeat_command(case)}")
        texts += [f"  {promise}" for promise in case["broken"]]
    texts.append(f"broken promises: {len(broken)} cases" if broken else "no promise was broken")
    return "\n".join(texts)


def _rows(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    cells = [[str(cell) for cell in row] for row in [heads, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("---" for _ in heads) + "|", *lines[1:]])


def _count(cases: Iterable[Case], word: str) -> int:
    return sum(any(word in promise for promise in case["broken"]) for case in cases)


def _of_kills(cases: Sequence[Case]) -> str:
    groups = defaultdict[tuple[str, str], list[Case]](list)
    for case in cases:
        if case.get("took_effect", True):
            groups[case.get("target", "?"), case.get("signal", "?")].append(case)
    heads = (
        "hit",
        "by",
        "kills",
        "hangs",
        "wrong bytes",
        "recorded lost",
        "other",
        "tiles again",
        "most",
        "under way",
    )
    rows = []
    every = [case for found in groups.values() for case in found]
    for (target, by), found in [*sorted(groups.items()), (("all", ""), every)]:
        hangs, wrong = _count(found, "hangs"), _count(found, "output is another")
        lost = sum(_count([case], "recorded") or _count([case], "the record") for case in found)
        other = sum(bool(case["broken"]) for case in found) - hangs - wrong - lost
        again = [case.get("computed_again", 0) for case in found]
        under_way = max((case.get("under_way_at_most", 0) for case in found), default=0)
        rows.append(
            (
                target,
                by,
                len(found),
                hangs,
                wrong,
                lost,
                max(0, other),
                sum(again),
                max(again, default=0),
                under_way,
            )
        )
    idle = len(cases) - len(every)
    return f"kills: {len(every)}, and {idle} cases whose command had ended before\n\n{_rows(heads, rows)}\n"


def _of_counts(cases: Sequence[Case]) -> str:
    return f"counts: {_of_kills(cases)}"


def _of_states(cases: Sequence[Case]) -> str:
    groups = defaultdict[tuple[str, str], list[Case]](list)
    for case in cases:
        groups[case.get("damage", "?"), case.get("state", "?")].append(case)
    heads = ("damage", "state", "cases", "refused", "kept", "counted", "broken")
    rows = [
        (damage, state, len(found), sum(case.get("refused", False) for case in found),
         *(sum(case.get(name, 0) for case in found) for name in ("kept", "counted")),
         sum(bool(case["broken"]) for case in found))
        for (damage, state), found in sorted(groups.items())
    ]  # fmt: skip
    return f"damaged states of counts: {len(cases)}\n\n{_rows(heads, rows)}\n"


def _of_damages(cases: Sequence[Case]) -> str:
    groups = defaultdict[tuple[str, str], list[Case]](list)
    for case in cases:
        groups[case.get("damage", "?"), ""].append(case)
        if case.get("remedy", "audit") != "audit":
            groups["(all)", case["remedy"]].append(case)
    heads = (
        "damage",
        "remedy",
        "cases",
        "found",
        "false alarms",
        "undamaged",
        "tiles to compute",
        "computed",
        "broken",
    )
    names = ("found", "false_alarms", "undamaged", "wanted", "computed")
    rows = [
        (damage, remedy, len(found), *(sum(case.get(name, 0) for case in found) for name in names),
         sum(bool(case["broken"]) for case in found))
        for (damage, remedy), found in sorted(groups.items())
    ]  # fmt: skip
    return f"damages: {len(cases)}\n\n{_rows(heads, rows)}\n"


def _of_cuts(cases: Sequence[Case]) -> str:
    if reasons := {case["not_run"] for case in cases if "not_run" in case}:
        return f"power cuts: not run: {', '.join(sorted(reasons))}\n"
    heads = ("cut", "cuts", "lines", "untrue", "kept", "C there", "whole", "broken")
    rows = []
    for moment in sorted({case.get("moment", "?") for case in cases}):
        found = [case for case in cases if case.get("moment", "?") == moment]
        sums = (sum(case.get(name, 0) for case in found) for name in ("lines", "untrue", "kept"))
        whole = [case["whole"] for case in found if "whole" in case]
        broken = sum(bool(case["broken"]) for case in found)
        rows.append((moment, len(found), *sums, len(whole), sum(whole), broken))
    return f"power cuts: {len(cases)}\n\n{_rows(heads, rows)}\n"


SUMMARIES: dict[str, Callable[[Sequence[Case]], str]] = {
    "kills": _of_kills,
    "damages": _of_damages,
    "cuts": _of_cuts,
    "counts": _of_counts,
    "states": _of_states,
}
