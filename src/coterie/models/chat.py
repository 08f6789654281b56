"""Prompts to token ids, once and for good: the ids are the truth, text is derived from them.

A chat template is rendered with placeholders instead of contents, which leaves a skeleton: the template's own control
tokens and text around each message. Contents are put into the skeleton as text or, where a part is an earlier turn, as
the very ids that were sampled. So nothing sampled is ever encoded again, no template can drop or rewrite a content,
and no content can forge a control token.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import Literal, TypeAlias

import jinja2
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from coterie.env import Prompt
from coterie.errors import ConfigError, EnvError
from coterie.types import EpisodeKey, Json, Message, MessageRole, StopReason, Turn, assistant, system, user

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

_PROBE: Roles = ("user", "assistant", "user")
_STRANGE = "\U0010fffd"  # a character that no vocabulary has: becomes the unknown token, or bytes


@dataclass(frozen=True, slots=True)
class Manners:
    """What a template accepts, found out once by trying it, so that training and evaluation follow one rule.

    ``system``: "kept" (anywhere), "first" (only as the first message; later ones become user messages) or "merged" (in
    front of the first user message). ``alternate``: neighbours of one message role are merged with a blank line.
    """

    system: Literal["kept", "first", "merged"]
    alternate: bool


class ChatRenderer:
    """Renders prompts for one tokenizer and one template, and decodes completions.

    ``end_ids``: sampling one of them ends a completion (the tokenizer's end token, the template's end of a turn).
    ``control_ids``: the special tokens and the template's delimiters; no content gets one into a prompt.
    ``prefill``: text the template writes in advance for the answer (``<think>\\n``); format checks must put it back.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        options: Mapping[str, Json] | None = None,
        policies: Iterable[str] | None = None,
    ) -> None:
        """Try the template out and settle its manners; ``ConfigError`` if it cannot be used.

        ``template``: left out, the tokenizer's own; "plain", see ``PLAIN``; else Jinja source or the path of a file
        with it. ``options`` are handed to the template (``enable_thinking``...). ``policies`` names those that sample
        ids of this tokenizer; turns of other policies enter as text. Left out, all do.
        """
        self._tokenizer = tokenizer
        self._template = _template_source(tokenizer, template)
        self._options = dict(options or {})
        self._policies = None if policies is None else frozenset(policies)
        self._added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        self._added_pattern = _added_token_pattern(tokenizer.added_tokens_decoder.values())
        self._skeletons: dict[Roles, tuple[Gap, ...]] = {}
        self.manners = self._settle_manners()
        header, opening = self._texts(_PROBE)[1], self._texts(("user",))[1]
        self.prefill = opening.removeprefix(header) if opening.startswith(header) else ""
        turn_end = _leading_control(self._skeleton(_PROBE)[2])
        self.end_ids = frozenset(i for i in (tokenizer.eos_token_id, turn_end) if i is not None)
        self.control_ids = self._find_control_ids()
        literals = [str(tokenizer.convert_ids_to_tokens(index)) for index in sorted(self.control_ids)]
        self._control_pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt's ids, up to and including the opening of the answer.

        Turns in assistant messages enter with exactly their sampled ids; where the last of them is the template's own
        end of a turn, the template does not write it again, and a truncated turn is closed once by the template. Turns
        quoted in other messages enter with their ids minus control tokens: what one role samples cannot open or close
        a message in another role's prompt.
        """
        messages = self._arrange(prompt)
        gaps = self._skeleton(tuple(message.role for message in messages))
        items: list[str | int] = list(gaps[0])
        for message, gap in zip(messages, gaps[1:], strict=True):
            content = self._content(message)
            items += content
            # The end the turn sampled stays, the template's copy goes: the ids before are then exactly those sampled.
            ended = message.role == "assistant" and bool(content) and content[-1] == _leading_control(gap)
            items += _after_leading_control(gap) if ended else gap
        ids: list[int] = []
        # Neighbouring texts are encoded together, as the tokenizer would: a template's newline may join a content's.
        for is_text, run in groupby(items, key=lambda item: isinstance(item, str)):
            if is_text:
                ids += self.text_ids("".join(map(str, run)))
            else:
                ids += map(int, run)
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without control tokens."""
        kept = [index for index in ids if index not in self.control_ids]
        text = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is a control token, whatever it looks like."""
        ids = self._encode(text, split_special_tokens=True)
        if self.control_ids.isdisjoint(ids):
            return ids
        # Delimiters that are not flagged special, and literals in the vocabulary, still match: break them up.
        cuts = [0, *(match.start() + 1 for match in self._control_pattern.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        ids = [index for piece in pieces for index in self._encode(piece, split_special_tokens=True)]
        return [index for index in ids if index not in self.control_ids]

    def forged_control_tokens(self, text: str) -> int:
        """Return how many pieces of a text look like control tokens; they are rendered as plain text."""
        return len(self._control_pattern.findall(text))

    def reference_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of the whole rendered text, turns as text: what a plain template call gives. For checks."""
        messages = self._arrange(prompt)
        contents = ["".join(part if isinstance(part, str) else part.text for part in m.parts) for m in messages]
        text = self._apply([(message.role, content) for message, content in zip(messages, contents, strict=True)])
        return tuple(self._encode(text, split_special_tokens=False))

    def describe(self) -> dict[str, Json]:
        """Return what was settled, for the run's record."""
        return {
            "template": self._template,
            "options": self._options,
            "system": self.manners.system,
            "alternate": self.manners.alternate,
            "prefill": self.prefill,
            "before_first_user": self._texts(("user",))[0],
            "end_tokens": [str(self._tokenizer.convert_ids_to_tokens(index)) for index in sorted(self.end_ids)],
            "changes_with_the_date": "strftime_now" in self._template,
        }

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        # The template writes the BOS token where the model wants one; the tokenizer must not add a second (TOK-05).
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens))

    def _apply(self, messages: Sequence[tuple[MessageRole, str]]) -> str:
        """Return the template's text for these messages; ``ConfigError`` says how it refused."""
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = [role for role, _ in messages]
            raise ConfigError(
                f"the chat template refuses messages {roles}: {type(error).__name__}: {error}. "
                'Give another template (template = "plain" always works) or other template options'
            ) from error
        return str(text)

    def _texts(self, roles: Roles) -> tuple[str, ...]:
        """Return the texts the template writes before, between and after contents of these roles."""
        places = [f"zq{index:04d}content{index:04d}qz" for index in range(len(roles))]
        rest = self._apply(list(zip(roles, places, strict=True)))
        texts = []
        for number, (role, place) in enumerate(zip(roles, places, strict=True)):
            before, found, after = rest.partition(place)
            if not found or place in after:
                did = "writes twice" if found else "drops or moves"
                raise ConfigError(
                    f"the chat template {did} message {number} ({role}) of {list(roles)}; expected every content once, "
                    'in order. Give another template (template = "plain" always works) or other template options'
                )
            texts.append(before)
            rest = after
        return (*texts, rest)

    def _skeleton(self, roles: Roles) -> tuple[Gap, ...]:
        if roles not in self._skeletons:
            self._skeletons[roles] = tuple(self._gap(text) for text in self._texts(roles))
        return self._skeletons[roles]

    def _gap(self, text: str) -> Gap:
        items: list[str | int] = []
        start = 0
        for match in self._added_pattern.finditer(text):
            items += [text[start : match.start()], self._added[match[match.lastindex or 0]]]
            start = match.end()
        return tuple(item for item in (*items, text[start:]) if item != "")

    def _accepts(self, *roles: MessageRole) -> bool:
        try:
            self._texts(roles)
        except ConfigError:
            return False
        return True

    def _settle_manners(self) -> Manners:
        self._texts(_PROBE)  # a template that cannot even do this is refused here, with its own message
        alternate = not (self._accepts("user", "user") and self._accepts("user", "assistant", "assistant", "user"))
        if not self._accepts("system", "user"):
            return Manners("merged", alternate)
        anywhere = self._accepts("system", "system", "user") and self._accepts("user", "assistant", "system", "user")
        return Manners("kept" if anywhere else "first", alternate)

    def _find_control_ids(self) -> frozenset[int]:
        special = {index for index, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self._tokenizer.all_special_ids)
        # An ordinary text may contain the unknown token, so it is no control token, unless it doubles as one.
        special -= set(self._encode(_STRANGE, split_special_tokens=True))
        delimiters = {item for gap in self._skeleton(_PROBE)[:3] for item in gap if isinstance(item, int)}
        return frozenset(special | delimiters | self.end_ids)

    def _arrange(self, prompt: Prompt) -> list[Message]:
        """Return the prompt's messages as the template accepts them: see ``Manners``."""
        messages = [user(prompt)] if isinstance(prompt, str) else list(prompt)
        if not messages:
            raise EnvError("a prompt has no message; expected at least one")
        if self.manners.system != "kept":
            head = list(takewhile(lambda message: message.role == "system", messages))
            rest = [replace(m, role="user") if m.role == "system" else m for m in messages[len(head) :]]
            if head and self.manners.system == "merged":
                asked = [rest.pop(0)] if rest and rest[0].role == "user" else []
                head = [replace(message, role="user") for message in (*head, *asked)]
            messages = [*_merged_neighbours(head), *rest]
        return _merged_neighbours(messages) if self.manners.alternate else messages

    def _content(self, message: Message) -> list[str | int]:
        items: list[str | int] = []
        for number, part in enumerate(message.parts):
            if isinstance(part, str):
                items.append(part)
            elif self._policies is not None and part.policy not in self._policies:
                items.append(part.text)
            elif message.role != "assistant":
                items += [index for index in part.completion_ids if index not in self.control_ids]
            elif number + 1 < len(message.parts) and part.completion_ids[-1] in self.end_ids:
                items += part.completion_ids[:-1]
            else:
                items += part.completion_ids
        return items


def _merged_neighbours(messages: Iterable[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, (*merged[-1].parts, "\n\n", *message.parts))
        else:
            merged.append(message)
    return merged


def _leading_control(gap: Gap) -> int | None:
    """Return the control token a gap starts with, white space aside."""
    for item in gap:
        if isinstance(item, int):
            return item
        if item.strip():
            return None
    return None


def _after_leading_control(gap: Gap) -> Gap:
    number = next(number for number, item in enumerate(gap) if isinstance(item, int))
    return gap[number + 1 :]


def _added_token_pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Return a pattern of one group per token: the longest wins, and some take the white space beside them along."""
    pieces = [
        (r"\s*" if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")
        for token in sorted(tokens, key=lambda token: -len(token.content))
    ]
    return re.compile("|".join(pieces) or r"(?!)")


def _template_source(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
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


def template_extends(renderer: ChatRenderer) -> str | None:
    """Return ``None`` if a second-turn prompt starts with the first turn's prompt and sampled ids, else why not.

    Where it does not, training is still right (every turn has its own prompt), but turns share less of their prefix.
    """
    first: list[Message] = [user("What is 2+2?")]
    opening = renderer.render(first)
    answer = (*renderer.text_ids("It is 4."), *sorted(renderer.end_ids)[:1])
    said = assistant(_sampled(opening, answer))
    expected = (*opening, *answer)
    found = renderer.render([*first, said, user("And 3+3?")])[: len(expected)]
    return _difference(expected, found, "the second turn's prompt leaves the first turn's ids")


def template_agrees(renderer: ChatRenderer) -> str | None:
    """Return ``None`` if rendering equals a plain template call on texts that need no care, else the difference."""
    prompt = [system("Be brief."), user("What is 2+2?"), assistant("It is 4."), user("And 3+3?")]
    return _difference(renderer.reference_ids(prompt), renderer.render(prompt), "rendering leaves the template's ids")


def _difference(expected: Sequence[int], found: Sequence[int], what: str) -> str | None:
    if tuple(expected) == tuple(found):
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    index = next((number for number, (a, b) in pairs if a != b), min(len(expected), len(found)))
    near = slice(max(0, index - 2), index + 6)
    return f"{what} at index {index}: expected {list(expected[near])}, found {list(found[near])}"


def _sampled(prompt_ids: tuple[int, ...], ids: tuple[int, ...]) -> Turn:
    key = EpisodeKey(seed=0, purpose="play", step=0, task_id="probe", index=0)
    return Turn(
        episode=key,
        act=0,
        candidate=0,
        role="probe",
        seat=0,
        round=0,
        policy="probe",
        version=0,
        peers="probe",
        prompt_ids=prompt_ids,
        completion_ids=ids,
        sampler_logprobs=(0.0,) * len(ids),
        text="",
        stop_reason=StopReason.END,
        temperature=1.0,
        played=True,
        trainable=False,
        reward=None,
        error=None,
    )
