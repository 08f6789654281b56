"""Prompts to token ids, once and for good: the ids are the truth, text is derived from them.

A chat template is rendered with placeholders instead of contents, which leaves the template's own control tokens and
text around each message. Contents are put between them as text or, where a part is an earlier turn, as the very ids
that were sampled. So nothing sampled is ever encoded again, no template can drop or rewrite a content, and no content
can forge a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from transformers import PreTrainedTokenizerBase

from coterie.env import Prompt
from coterie.errors import EnvError
from coterie.models.template import PROBE, Template, after_leading_control, leading_control
from coterie.types import EpisodeKey, Json, Message, StopReason, Turn, assistant, system, user

_STRANGE = "\U0010fffd"  # a character that no vocabulary has: becomes the unknown token, or bytes


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
        """Try the template out; ``ConfigError`` if it cannot be used.

        ``template``: left out, the tokenizer's own; "plain", see ``template.PLAIN``; else Jinja source or the path of
        a file of it. ``options`` are handed to the template (``enable_thinking``...). ``policies`` names those that
        sample ids of this tokenizer; turns of other policies enter as text. Left out, all do.
        """
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, template, options)
        self._policies = None if policies is None else frozenset(policies)
        self.manners = self._template.manners
        self.prefill = self._template.prefill
        ends = (tokenizer.eos_token_id, self._template.turn_end)
        self.end_ids = frozenset(index for index in ends if index is not None)
        # what ends an answer in this template, and so ends demonstrations
        self.end_id: int = tokenizer.eos_token_id if self._template.turn_end is None else self._template.turn_end
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
        messages = self._arranged(prompt)
        gaps = self._template.gaps(tuple(message.role for message in messages))
        items: list[str | int] = list(gaps[0])
        for message, gap in zip(messages, gaps[1:], strict=True):
            content = self._content(message)
            items += content
            # The end the turn sampled stays, the template's copy goes: the ids before are then exactly those sampled.
            ended = message.role == "assistant" and bool(content) and content[-1] == leading_control(gap)
            items += after_leading_control(gap) if ended else gap
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
        messages = self._arranged(prompt)
        contents = ["".join(part if isinstance(part, str) else part.text for part in m.parts) for m in messages]
        text = self._template.apply([message.role for message in messages], contents)
        return tuple(self._encode(text, split_special_tokens=False))

    def standalone_template(self) -> str:
        """Return Jinja source that renders so in a plain template call: the options are its defaults."""
        defaults = [
            # Jinja reads escapes one by one: a character written as two surrogates would stay two
            f"{{%- set {key} = {key} if {key} is defined else {json.dumps(value, ensure_ascii=False)} -%}}"
            for key, value in self._template.options.items()
        ]
        return "".join(defaults) + self._template.source

    def renders_like(self, other: ChatRenderer) -> bool:
        """Return whether both render every prompt to the same ids, and mean the same texts by them."""
        same_template = self.standalone_template() == other.standalone_template()
        return same_template and self._tokenizer.get_vocab() == other._tokenizer.get_vocab()

    def describe(self) -> dict[str, Json]:
        """Return what was settled, for the run's record."""
        return {
            "template": self._template.source,
            "options": self._template.options,
            "system": self.manners.system,
            "alternate": self.manners.alternate,
            "prefill": self.prefill,
            "before_first_user": self._template.texts(("user",))[0],
            "end_tokens": [str(self._tokenizer.convert_ids_to_tokens(index)) for index in sorted(self.end_ids)],
            "changes_with_the_date": "strftime_now" in self._template.source,
        }

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        # The template writes the BOS token where the model wants one; the tokenizer must not add a second.
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens))

    def _find_control_ids(self) -> frozenset[int]:
        special = {index for index, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(self._tokenizer.all_special_ids)
        # An ordinary text may contain the unknown token, so it is no control token, unless it ends completions.
        special -= set(self._encode(_STRANGE, split_special_tokens=True))
        delimiters = {item for gap in self._template.gaps(PROBE)[:3] for item in gap if isinstance(item, int)}
        return frozenset(special | delimiters | self.end_ids)

    def _arranged(self, prompt: Prompt) -> list[Message]:
        messages = [user(prompt)] if isinstance(prompt, str) else list(prompt)
        if not messages:
            raise EnvError("a prompt has no message; expected at least one")
        return self.manners.arrange(messages)

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


def template_extends(renderer: ChatRenderer) -> str | None:
    """Return ``None`` if a second-turn prompt starts with the first turn's prompt and sampled ids, else why not.

    Where it does not, training is still right (every turn has its own prompt), but turns share less of their prefix.
    """
    first: list[Message] = [user("What is 2+2?")]
    opening = renderer.render(first)
    answer = tuple(renderer.text_ids("It is 4."))
    expected = (*opening, *answer)
    found = renderer.render([*first, assistant(_sampled(opening, answer, renderer.decode(answer))), user("And 3+3?")])
    return _difference(expected, found[: len(expected)], "the second turn's prompt leaves the first turn's ids")


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


def _sampled(prompt_ids: tuple[int, ...], ids: tuple[int, ...], text: str) -> Turn:
    return Turn(
        episode=EpisodeKey(seed=0, purpose="play", step=0, task_id="probe", index=0),
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
        text=text,
        stop_reason=StopReason.LENGTH,
        temperature=1.0,
        played=True,
        trainable=False,
        reward=None,
        error=None,
    )
