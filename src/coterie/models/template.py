"""What a chat template writes around contents, and which messages it accepts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, TypeAlias

import jinja2
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from coterie.errors import ConfigError
from coterie.types import Json, Message, MessageRole

PLAIN = (
    "{% for message in messages %}{{ message['role'].capitalize() }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token or '' }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""The fallback for tokenizers without a chat template, chosen with ``template = "plain"``::

    User:
    2+2?

    Assistant:
    4<eos>
"""

Roles: TypeAlias = tuple[MessageRole, ...]
Gap: TypeAlias = tuple[str | int, ...]
"""What the template writes between two contents: its text, and its control tokens as ids."""

PROBE: Roles = ("user", "assistant", "user")


@dataclass(frozen=True, slots=True)
class Manners:
    """What a template accepts, found out once by trying it, so that training and evaluation follow one rule.

    ``system``: "kept" (anywhere), "first" (only as the first message; later ones become user messages) or "merged" (in
    front of the first user message). ``alternate``: neighbours of one message role are merged with a blank line.
    """

    system: Literal["kept", "first", "merged"]
    alternate: bool

    def arrange(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template accepts them; every part is kept, in order, once."""
        arranged = list(messages)
        if self.system != "kept":
            head = list(takewhile(lambda message: message.role == "system", messages))
            rest = [replace(m, role="user") if m.role == "system" else m for m in messages[len(head) :]]
            if head and self.system == "merged":
                asked = [rest.pop(0)] if rest and rest[0].role == "user" else []
                head = [replace(message, role="user") for message in (*head, *asked)]
            arranged = [*_merged_neighbours(head), *rest]
        return _merged_neighbours(arranged) if self.alternate else arranged


class Template:
    """A chat template, tried out: it is rendered with placeholders, and only what it writes around them is kept.

    ``prefill``: text written in advance for the answer (``<think>\\n``). ``turn_end``: the token an answer ends with.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, options: Mapping[str, Json] | None
    ) -> None:
        """Settle what the template accepts; ``ConfigError`` if that is not even a plain exchange."""
        self._tokenizer = tokenizer
        self.source = _source(tokenizer, template)
        self.options = dict(options or {})
        added: Mapping[int, AddedToken] = tokenizer.added_tokens_decoder
        self._added = {token.content: index for index, token in added.items()}
        self._added_pattern = _added_token_pattern(added.values())
        self._gaps: dict[Roles, tuple[Gap, ...]] = {}
        header, opening = self.texts(PROBE)[1], self.texts(("user",))[1]
        self.prefill = opening.removeprefix(header) if opening.startswith(header) else ""
        self.turn_end = leading_control(self.gaps(PROBE)[2])
        self.manners = self._settle_manners()

    def apply(self, roles: Sequence[MessageRole], contents: Sequence[str]) -> str:
        """Return the whole text for these messages and the opening of an answer."""
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self.source, tokenize=False, add_generation_prompt=True, **self.options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the chat template refuses messages {list(roles)}: {type(error).__name__}: {error}. "
                'Give another template (template = "plain" always works) or other template options'
            ) from error
        return str(text)

    def texts(self, roles: Roles) -> tuple[str, ...]:
        """Return the texts the template writes before, between and after contents: one more than roles."""
        places = [f"zq{number:04d}content{number:04d}qz" for number in range(len(roles))]
        rest = self.apply(roles, places)
        texts = []
        for number, place in enumerate(places):
            before, found, after = rest.partition(place)
            if not found or place in after:
                did = "writes twice" if found else "drops or moves"
                raise ConfigError(
                    f"the chat template {did} message {number} of {list(roles)}; expected every content once, in "
                    'order. Give another template (template = "plain" always works) or other template options'
                )
            texts.append(before)
            rest = after
        return (*texts, rest)

    def gaps(self, roles: Roles) -> tuple[Gap, ...]:
        """Return ``texts`` with the control tokens in it as ids. Kept: it depends on nothing but the roles."""
        if roles not in self._gaps:
            self._gaps[roles] = tuple(self._gap(text) for text in self.texts(roles))
        return self._gaps[roles]

    def _gap(self, text: str) -> Gap:
        items: list[str | int] = []
        start = 0
        for match in self._added_pattern.finditer(text):
            items += [text[start : match.start()], self._added[match[match.lastindex or 0]]]
            start = match.end()
        return tuple(item for item in (*items, text[start:]) if item != "")

    def _settle_manners(self) -> Manners:
        alternate = not (self._accepts("user", "user") and self._accepts("user", "assistant", "assistant", "user"))
        if not self._accepts("system", "user"):
            return Manners("merged", alternate)
        anywhere = self._accepts("system", "system", "user") and self._accepts("user", "assistant", "system", "user")
        return Manners("kept" if anywhere else "first", alternate)

    def _accepts(self, *roles: MessageRole) -> bool:
        try:
            self.texts(roles)
        except ConfigError:
            return False
        return True


def leading_control(gap: Gap) -> int | None:
    """Return the control token a gap starts with, white space aside."""
    for item in gap:
        if isinstance(item, int):
            return item
        if item.strip():
            return None
    return None


def after_leading_control(gap: Gap) -> Gap:
    """Return what follows the control token a gap starts with."""
    number = next(number for number, item in enumerate(gap) if isinstance(item, int))
    return gap[number + 1 :]


def _merged_neighbours(messages: Iterable[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, (*merged[-1].parts, "\n\n", *message.parts))
        else:
            merged.append(message)
    return merged


def _added_token_pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Return a pattern of one group per token: the longest wins, and some take the white space beside them along."""
    pieces = [
        (r"\s*" if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")
        for token in sorted(tokens, key=lambda token: -len(token.content))
    ]
    return re.compile("|".join(pieces) or r"(?!)")


def _source(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    if template == "plain":
        # Where the tokenizer puts a BOS token in front of a plain text, so must the plain template.
        bos, start = tokenizer.bos_token_id, tokenizer.encode("a")[:1]
        return ("{{ bos_token }}" if bos is not None and start == [bos] else "") + PLAIN
    if template is not None and ("{{" in template or "{%" in template):
        return template
    if template is not None:
        try:
            return pathlib.Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f'template = {template!r}: cannot read it ({error}); expected "plain", Jinja source or a file of it'
            ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template (a base model?). Set the option "
            'template = "plain", or give the path of a Jinja chat template'
        )
    return str(tokenizer.get_chat_template())
