"""The style of a report's page. Each rule is of what lies in ``tw-report``, so that in a notebook it touches nothing
else."""

PROGRAM = "Tilewright"
"""What pages, and plots of counts, say that they were made by."""
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff9447"),
    ("#009e73", "#2fc99a"),
    ("#cc79a7", "#e29cc4"),
    ("#b8860b", "#f0c94a"),
    ("#5b4bb7", "#a99cf5"),
    ("#8c564b", "#c99083"),
    ("#17808f", "#5fd0de"),
    ("#7f7f00", "#c3c34a"),
    ("#a0303f", "#ef7f8c"),
)
"""Of workers, on light and on dark."""

_LIGHT = {
    "back": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "empty": "#f0f2f4",
    "load": "#2f6f9f",
    "compute": "#c9741c",
    "write": "#4d8f3d",
    "good": "#1a7f37",
    "bad": "#c1121f",
    "phase0": "#e3e8ee",
    "phase1": "#cfd7e0",
    "earlier": "#b3bac2",
    "limit": "#c1121f",
}
_DARK = {
    "back": "#14181d",
    "text": "#e6edf3",
    "muted": "#9aa6b2",
    "line": "#363e47",
    "empty": "#20262d",
    "load": "#5aa3d6",
    "compute": "#e79a4d",
    "write": "#7cbf6b",
    "good": "#4cc06a",
    "bad": "#ff7b72",
    "phase0": "#29313a",
    "phase1": "#36404b",
    "earlier": "#59636e",
    "limit": "#ff7b72",
}


def _variables(shade: int) -> str:
    named = (_LIGHT, _DARK)[shade]
    colours = [f"--tw-{name}:{value};" for name, value in named.items()]
    return "".join(colours + [f"--tw-w{place}:{pair[shade]};" for place, pair in enumerate(COLOURS)])


STYLE = (
    f".tw-report{{color-scheme:light dark;{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{.tw-report{{{_variables(1)}}}}}"
    """
.tw-report{background:var(--tw-back);color:var(--tw-text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
 max-width:1000px;margin:0 auto;padding:1.5rem 1rem 3rem;box-sizing:border-box}
.tw-report h1{font-size:1.45rem;line-height:1.25;margin:0 0 .3rem;overflow-wrap:anywhere}
.tw-report h2{font-size:1.1rem;margin:2rem 0 .5rem;padding-bottom:.2rem;border-bottom:1px solid var(--tw-line)}
.tw-report h3{font-size:.95rem;margin:1rem 0 .3rem}
.tw-report p{margin:.4rem 0}
.tw-report .tw-note,.tw-report .tw-muted{color:var(--tw-muted);font-size:.87rem}
.tw-report .tw-lead{font-size:1.02rem}
.tw-report table{border-collapse:collapse;margin:.5rem 0;font-size:.9rem}
.tw-report th,.tw-report td{padding:.22rem .8rem .22rem 0;text-align:left;vertical-align:top;
 border-bottom:1px solid var(--tw-line);font-variant-numeric:tabular-nums}
.tw-report th{font-weight:600}
.tw-report td{overflow-wrap:anywhere}
.tw-report .tw-right{text-align:right}
.tw-report .tw-scroll{overflow-x:auto}
.tw-report pre{overflow-x:auto;background:var(--tw-empty);padding:.7rem;border-radius:6px;font-size:.82rem;
 white-space:pre-wrap}
.tw-report summary{cursor:pointer;color:var(--tw-muted)}
.tw-report .tw-tiles{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
.tw-report .tw-tile{background:var(--tw-empty);border-radius:8px;padding:.5rem .9rem;min-width:8rem}
.tw-report .tw-tile b{display:block;font-size:1.15rem;font-variant-numeric:tabular-nums}
.tw-report .tw-tile span{color:var(--tw-muted);font-size:.83rem}
.tw-report .tw-good{color:var(--tw-good)}
.tw-report .tw-bad{color:var(--tw-bad)}
.tw-report .tw-caution{border-left:3px solid var(--tw-bad);padding-left:.6rem}
.tw-report .tw-key{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em}
.tw-report .tw-legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.87rem;margin:.3rem 0}
.tw-report .tw-picture{max-width:100%;height:auto;display:block;margin:.4rem 0}
.tw-report .tw-side{display:flex;flex-wrap:wrap;gap:1rem 2rem;align-items:flex-start}
.tw-report .tw-side>div{min-width:0;max-width:100%}
.tw-report .tw-side>div:last-child{flex:1 1 18rem}
.tw-report .tw-label{fill:var(--tw-text);font-family:inherit;font-size:12px}
.tw-report .tw-small{font-size:10px;fill:var(--tw-muted)}
.tw-report .tw-strong{font-weight:600}
.tw-report .tw-grid{stroke:var(--tw-line);stroke-width:1;fill:none}
.tw-report .tw-limit{stroke:var(--tw-limit);stroke-width:1.5;stroke-dasharray:6 4;fill:none}
.tw-report .tw-empty{fill:var(--tw-empty);stroke:var(--tw-line)}
.tw-report .tw-load{fill:var(--tw-load);background:var(--tw-load)}
.tw-report .tw-compute{fill:var(--tw-compute);background:var(--tw-compute)}
.tw-report .tw-write{fill:var(--tw-write);background:var(--tw-write)}
.tw-report .tw-piece{fill:var(--tw-w0);background:var(--tw-w0)}
.tw-report .tw-whole{fill:var(--tw-muted)}
.tw-report .tw-phase0{fill:var(--tw-phase0)}
.tw-report .tw-phase1{fill:var(--tw-phase1)}
.tw-report .tw-earlier{fill:var(--tw-earlier);background:var(--tw-earlier)}
.tw-report .tw-line{fill:none;stroke-width:1.8;stroke-linecap:round;stroke-linejoin:round}
"""
    + "".join(
        f".tw-report .tw-w{place}{{fill:var(--tw-w{place});background:var(--tw-w{place})}}"
        f".tw-report .tw-l{place}{{stroke:var(--tw-w{place})}}"
        for place in range(len(COLOURS))
    )
)

PAGE_STYLE = (
    "html{color-scheme:light dark}"
    f"body{{margin:0;background:{_LIGHT['back']}}}"
    f"@media (prefers-color-scheme:dark){{body{{background:{_DARK['back']}}}}}"
)
