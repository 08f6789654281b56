"""The final answer of a text: what stands in its last box. Loaders, environments and graders read it by one rule."""

from __future__ import annotations

import re


def last_boxed(text: str) -> str | None:
    """Return what stands in the last ``\\boxed{...}`` of a text, braces matched; ``None`` where there is none.

    The last box counts, whatever stands before it. A last box that is never closed is no answer. Of a box within a box
    the inner one is the answer.
    """
    start = text.rfind("\\boxed{")
    end = _closing(text, start + len("\\boxed")) if start >= 0 else None
    return None if end is None else text[start + len("\\boxed{") : end]


def _closing(text: str, start: int) -> int | None:
    """Return where the brace that opens at ``start`` is closed; ``\\{`` and ``\\}`` are letters."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", flags=re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] == "}":
            return found.start()
    return None
