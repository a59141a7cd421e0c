"""The account of a run as one HTML file that needs nothing else: no server, no internet, no torch.

Style, script and data are inside the file. Its policy lets the browser run this one script, by
digest, and load nothing at all. What comes from ledgers (names of roots, errors of storages) is
data: JSON in a script element, escaped so that it can't end the element, and made into text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from trainer.ett.page_data import page_data
from trainer.ett.records import Advice, Loss, RunReport

_SCRIPTS = ("words.js", "plots.js", "page.js")  # one after the other, in one script


def write_page(
    reports: Sequence[RunReport],
    losses: Sequence[tuple[Loss, ...]],
    advice: Sequence[Advice | None],
    path: Path,
    *,
    fleet_percent: float | None = None,
) -> None:
    """Write the page of one run, or of several beside each other. OSError where that fails."""
    path.write_text(render(reports, losses, advice, fleet_percent=fleet_percent), encoding="utf-8")


def render(
    reports: Sequence[RunReport],
    losses: Sequence[tuple[Loss, ...]],
    advice: Sequence[Advice | None],
    *,
    fleet_percent: float | None = None,
) -> str:
    """The page as text. Losses and advice are those of each report, in the same order.

    fleet_percent: ETT% of all runs together; by default weighted by wall time times ranks.
    """
    style = _file("page.css")
    script = '"use strict";\n' + "\n".join(_file(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = _file("page.html")
    for name, text in (
        ("POLICY", policy),
        ("STYLE", style),
        ("SCRIPT", script),
        ("DATA", _in_script(page_data(reports, losses, advice, fleet_percent))),
    ):
        before, found, after = page.partition(f"@{name}@")
        assert found, f"page.html has no @{name}@"
        page = before + text + after
    return page


def _file(name: str) -> str:
    return (resources.files(__package__) / "page_files" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression of a Content-Security-Policy that allows exactly this inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _in_script(data: object) -> str:
    """JSON that can stand in a script element: it can't end it, nor open a comment in it.

    ASCII only: names of files may hold bytes that are no text in UTF-8.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
