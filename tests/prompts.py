"""What tests of environments read of a prompt; nothing here is a test."""

from __future__ import annotations

from coterie.env import Prompt


def as_text(prompt: Prompt) -> str:
    """Return the text of a prompt, its messages below each other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(part) for message in prompt for part in message.parts)
