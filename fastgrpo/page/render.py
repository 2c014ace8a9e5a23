"""Renders a page: skeleton, styles, scripts, plotly's bundle, and the payload as JSON.

All data of a run (prompts, completions, names) is in the payload. Its JSON cannot end the script element, and the
scripts write text nodes. So a completion is never interpreted as HTML.
"""

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

SCRIPTS = ("page.js", "charts.js", "samples.js")
# Characters that could end a script element, or a line of JavaScript, in a JSON string.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(payload: dict[str, Any]) -> str:
    """Write the page."""
    from plotly.offline import get_plotlyjs

    text = json.dumps(payload, ensure_ascii=False, allow_nan=False).translate(str.maketrans(ESCAPES))
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, which UTF-8 cannot encode
    plotly = get_plotlyjs().encode()
    parts = {
        "styles": asset("style.css"),
        "plotly": base64.b64encode(gzip.compress(plotly, 6, mtime=0)).decode(),  # a third of its size
        "payload": text,
        "scripts": "\n".join(map(asset, SCRIPTS)),
    }
    page = re.sub(r"@@(?!policy)(\w+)@@", lambda place: parts[place[1]], asset("page.html"))
    return page.replace("@@policy@@", policy(page, plotly), 1)


def policy(page: str, plotly: bytes) -> str:
    """Return the content security policy: only plotly and the scripts of the page, and no requests."""
    scripts = [plotly, *(script.encode() for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL))]
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{code}'" for code in hashes),
            "style-src 'unsafe-inline'",  # plotly writes styles
            "img-src data: blob:",  # plotly's button that saves a picture
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def asset(name: str) -> str:
    """Read a file of the page."""
    return (files("fastgrpo.page") / "assets" / name).read_text(encoding="utf-8")
