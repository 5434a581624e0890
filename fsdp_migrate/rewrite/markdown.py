"""The report as a Markdown page, for a review."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_migrate.rewrite.report import STATES, Result, Site, totals

_MEANING = {
    "rewritten": "rewritten, the same",
    "differs": "rewritten, and differs as said",
    "todo": "left with a marker: needs a human",
    "skipped": "left on purpose",
}


def page(results: Sequence[Result]) -> str:
    found = totals(results)
    lines = ["# From FSDP1 to FSDP2", "", "| state | sites | meaning |", "|---|---|---|"]
    lines += [f"| {state} | {found[state]} | {_MEANING[state]} |" for state in STATES]
    for result in results:
        if result.error is not None:
            lines += ["", f"## {result.path}", "", f"**Not handled.** {result.error}"]
        elif result.sites:
            lines += ["", f"## {result.path}", "", "| line | state | FSDP1 | rule | |"]
            lines += ["|---|---|---|---|---|", *map(_row, result.sites)]
    return "\n".join(lines) + "\n"


def _row(site: Site) -> str:
    cells = (str(site.line), site.state, f"`{site.api}`", site.rule, site.message)
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"
