"""Published answers of mathematics: the same as themselves in five other forms, and as none of their neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from coterie.grading.maths import Verifier
from coterie.grading.maths_numbers import read_number
from coterie.grading.maths_text import compact, named, readings, spelled
from published_problems import DATA, answers

pytestmark = [pytest.mark.data, pytest.mark.skipif(not DATA.exists(), reason=f"no public data sets in {DATA}")]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    one = Verifier(num_workers=1)
    yield one
    one.close()


def five_forms(gold: str) -> list[str]:
    """Return an answer written in five other ways."""
    plain = spelled(gold)
    name, value = named(plain)
    number = read_number(plain) if readings(gold)[0].kind == "scalar" else None
    if number is not None:
        top, under = number.value.numerator, number.value.denominator
        same_value = f"{top}.0" if under == 1 else f"\\dfrac {{{top}}} {{{under}}}"
        same_value = "62.50\\%" if plain == "62.5%" else same_value
        double = f"{plain} \\text{{ units}}" if number.percent else f"\\frac{{{2 * top}}}{{{2 * under}}}"
        return [f"\\displaystyle {gold}.", same_value, f"x = {plain}", f"\\( 0{plain} \\)", double]
    return [
        f"\\displaystyle {gold}.",
        "\\; " + re.sub(r"\\[dt]?frac(?![a-z])", r"\\dfrac", gold.replace("\\left", "").replace("\\right", "")),
        plain.replace(",", " ,\\; ") + "\\,",
        f"  {compact(plain)}  ",
        value
        if name and plain.count("=") == 1
        else f"x = {plain}"
        if "=" not in plain and "," not in plain
        else f"\\[ {gold} \\]",
    ]


def neighbours(gold: str) -> list[str]:
    """Return wrong answers that look like an answer."""
    plain = spelled(gold)
    node = readings(gold)[0]
    number = read_number(plain) if node.kind == "scalar" else None
    if number is not None:
        value = number.value
        ends = f"/{value.denominator}" if value.denominator > 1 else ""
        near = [f"{value.numerator + value.denominator}{ends}", f"{10 * value.numerator + 1}{ends}", f"{plain}, 1"]
        return [*near, f"{-value.numerator}{ends}"] if value else near
    if re.fullmatch(r"(\\text)?[({]*[A-Za-z]+[)}]*", plain):
        return ["\\text{nothing}", "7", f"{plain}, 7"]
    if node.kind in ("list", "()", "[]", "(]", "[)", "union", "set"):
        longer = f"{plain}, 991" if node.kind in ("list", "union") else re.sub(r"(\\?[)\]}])$", r", 991\1", plain)
        return [longer, "7", re.sub(r"\d+", "991", plain, count=1) if re.search(r"\d", plain) else "8"]
    if node.kind == "matrix" or "_" in plain or "where" in plain or "\\le" in plain or "\\ge" in plain:
        return ["7", re.sub(r"\d+", "991", plain, count=1) if re.search(r"\d", plain) else "8"]
    _, value_text = named(plain)
    return [f"{value_text} + 1", f"2({value_text})", f"-({value_text})", f"{value_text}, 7"]


def faults(golds: list[str], verifier: Verifier) -> list[str]:
    """Return what is judged wrongly of some answers."""
    found = []
    for gold in golds:
        right = [gold, *five_forms(gold)]
        assert len(set(right)) == 6, right
        found += [f"{gold} != {form}" for form in right if not verifier.verify_now(gold, f"\\boxed{{{form}}}").correct]
        wrong = neighbours(gold)
        found += [f"{gold} == {form}" for form in wrong if verifier.verify_now(gold, f"\\boxed{{{form}}}").correct]
    return found


def test_a_part_of_the_published_answers_is_judged_rightly_in_all_forms(verifier: Verifier) -> None:
    assert faults([gold for golds in answers().values() for gold in sorted(set(golds))[::12]], verifier) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["aime24", "aime25", "math500", "olympiadbench", "gsm8k"])
def test_every_published_answer_is_judged_rightly_in_all_forms(name: str, verifier: Verifier) -> None:
    assert faults(list(dict.fromkeys(answers()[name])), verifier) == []
