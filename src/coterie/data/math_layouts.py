"""Published layouts of problems of mathematics, by the fields they have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coterie.boxed import last_boxed
from coterie.data.fields import RowError, answer_of, optional, text_of, unjson
from coterie.problems import MathProblem

# What data sets put around a question for one prompt or another; a prompt of our own would ask twice.
_INSTRUCTIONS = (
    "Let's think step by step and output the final answer within \\boxed{}.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    'Remember to put your answer on its own line after "Answer:".',
    (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem."
    ),
)


def gsm8k(fields: Mapping[str, Any], id: str) -> MathProblem:
    """GSM8K: the answer stands behind ``####``, maybe with thousands commas."""
    solution = text_of(fields, "answer")
    _, mark, answer = solution.rpartition("####")
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())
    if not mark or not answer:
        raise RowError("field 'answer' has no final answer behind '####'")
    return MathProblem(id=id, question=text_of(fields, "question"), answer=answer)


def olympiad(fields: Mapping[str, Any], id: str) -> MathProblem:
    """OlympiadBench: lists of final answers; a context may stand before the question."""
    answers = fields.get("final_answer")
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(item, str) and item.strip() for item in answers)
    ):
        raise RowError(f"field 'final_answer' is {str(answers)[:80]!r}, expected a list of answers")
    context, question = optional(fields, "context"), text_of(fields, "question")
    unit = optional(fields, "unit")
    asked = f"{context}\n\n{question}" if context else question
    asked += f"\n\nGive the answer in {unit}." if unit else ""
    return MathProblem(id=id, question=asked, answer=", ".join(item.strip() for item in answers))


def verl(fields: Mapping[str, Any], id: str) -> MathProblem:
    """The rows of DAPO, DeepScaleR and Skywork for verl: a chat prompt and ``reward_model.ground_truth``."""
    reward, prompt, extra = (fields.get(name) for name in ("reward_model", "prompt", "extra_info"))
    if not isinstance(reward, Mapping) or not isinstance(prompt, list) or not isinstance((prompt or [0])[-1], Mapping):
        raise RowError("expected a list of messages 'prompt' and an object 'reward_model'")
    if "code" in str(fields.get("ability", "")).lower():
        raise RowError(f"ability {fields['ability']!r} is not mathematics")
    raw = extra.get("raw_problem") if isinstance(extra, Mapping) else None
    question = raw if isinstance(raw, str) and raw.strip() else text_of(prompt[-1], "content")
    for words in _INSTRUCTIONS:
        question = question.replace(words, "")
    answer = answer_of(reward, "ground_truth")
    if answer.startswith('["') and answer.endswith('"]'):
        answer = ", ".join(map(str, unjson(answer, "ground_truth")))
    return MathProblem(id=id, question=text_of({"prompt": question.strip()}, "prompt"), answer=answer)


def math_solutions(fields: Mapping[str, Any], id: str) -> MathProblem:
    """MATH as first published: the answer is the last ``\\boxed{}`` of the solution."""
    answer = (last_boxed(text_of(fields, "solution")) or "").strip()
    if not answer:
        raise RowError("field 'solution' has no \\boxed{} answer")
    return MathProblem(id=id, question=text_of(fields, "problem"), answer=answer)


def aime_table(fields: Mapping[str, Any], id: str) -> MathProblem:
    """The table of past AIMEs (Question, Answer)."""
    return MathProblem(id=id, question=text_of(fields, "Question"), answer=_aime_answer(fields))


def aime24(fields: Mapping[str, Any], id: str) -> MathProblem:
    """Maxwell-Jia/AIME_2024 (Problem, Answer)."""
    return MathProblem(id=id, question=text_of(fields, "Problem"), answer=_aime_answer(fields))


def _aime_answer(fields: Mapping[str, Any]) -> str:
    answer = answer_of(fields, "Answer")
    if not re.fullmatch(r"\d{1,3}", answer):
        raise RowError(f"field 'Answer' is {answer!r}; an AIME's is one whole number from 0 to 999")
    return answer


def problem_answer(fields: Mapping[str, Any], id: str) -> MathProblem:
    """``problem`` and ``answer``: MATH-500, AIME, DeepScaleR, Polaris, MATH with answers."""
    return MathProblem(id=id, question=text_of(fields, "problem"), answer=answer_of(fields, "answer"))


def question_answer(fields: Mapping[str, Any], id: str) -> MathProblem:
    """``question`` and ``answer``; with GSM8K's mark the answer stands behind it."""
    if "####" in str(fields.get("answer")):
        return gsm8k(fields, id)
    return MathProblem(id=id, question=text_of(fields, "question"), answer=answer_of(fields, "answer"))
