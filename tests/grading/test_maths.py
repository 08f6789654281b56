"""Answers of mathematics: what is read, what is the same, and what a hostile answer does to the comparison."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from coterie.boxed import last_boxed
from coterie.errors import ConfigError, SandboxError
from coterie.grading import maths
from coterie.grading.maths import Reason, Verdict, Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    one = Verifier(num_workers=1, cpu_s=5.0)
    yield one
    one.close()


def boxed(answer: str) -> str:
    return f"So the answer is $\\boxed{{{answer}}}$."


SAME = [
    # fractions and decimals
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\dfrac12"),
    ("1/2", r"\tfrac{2}{4}"),
    ("1/2", "0.5"),
    ("1/2", ".5"),
    ("1/2", "1/2"),
    ("1/2", r"$\frac{1}{2}$"),
    ("1/3", "0.333333"),  # six digits that are those of 1/3
    ("2/3", "0.666667"),
    ("2/3", "0.666666"),
    (r"137 \frac{1}{2}", "137.5"),
    (r"\frac{275}{2}", r"137\frac12"),
    ("5/4", "1 1/4"),
    (r"-\frac{3}{8}", r"\frac{-3}{8}"),
    # integers
    ("033", "33"),
    ("4", "004"),
    ("1000000", "1000000.0000001"),
    ("1000000", r"1{,}000{,}000"),
    ("12345", "12,345"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\$32,\!348", "32348"),
    ("1000", "10^3"),
    ("3000", r"3 \times 10^{3}"),
    ("8", "2^3"),
    # units, degrees, percent
    (r"336^\circ", "336"),
    ("45", r"45^{\circ}"),
    ("45", "45°"),
    (r"15\mbox{ cm}^2", "15"),
    ("5.4", r"5.4 \text{ cents}"),
    ("30", "30 degrees"),
    ("62.5%", "62.5"),
    ("62.5%", r"0.625"),
    ("0.175", r"17.5\%"),
    # irrational numbers and formulas
    (r"\frac{1}{\sqrt{2}}", "0.70710678"),
    ("0.70710678", r"\frac{1}{\sqrt{2}}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"11\sqrt2", r"\sqrt{242}"),
    (r"3\pi", r"\pi \cdot 3"),
    ("2k+2", "2(k+1)"),
    ("p - q", "-q+p"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    ("6 - 5i", "-5i + 6"),
    (r"2^{k-1}", r"\frac{2^k}{2}"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    # names in front
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y = 2x + 3", "2x+3"),
    ("f(x)=x+1", "f(x) = 1 + x"),
    (r"x \in [-2,7]", "[-2, 7]"),
    # lists, tuples, sets, intervals, matrices
    ("3, 2, 4", "3,2,4"),
    ("1, 2, 4", "4, 1, 2"),  # in ascending order a list has no order
    ("1,-2", "1, -2"),
    (r"\{2, 3, 4\}", r"\{3, 2, 4\}"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    ("(6,31,-1)", r"\left( 6, 31, -1 \right)"),
    ("(1,2),(3,4)", "(3,4), (1,2)"),
    (r"\left(\frac{3}{5},\frac{8}{3}\right]", "(0.6, 8/3]"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"),
    (r"(-\infty, 0]", r"\left(-\infty,0\right]"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\\frac23\end{bmatrix}"),
    ("2 and 3", r"2 \text{ and } 3"),
    # words
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    ("C", "(C)"),
    ("52_8", "52_{8}"),
    # relations, as math-verify compares them
    ("k \\geqslant 2", r"k \ge 2"),
]

DIFFERENT = [
    ("1/2", r"-\frac12"),
    ("1/2", "1"),
    ("1/2", "2"),
    ("1/2", "12"),
    ("1/2", "0.51"),
    ("1/2", "\frac{1}{2}"),  # a lost backslash: form feed, "rac"
    ("1/3", "0.33"),
    ("1/3", "0.33333"),
    ("1/3", "0.333334"),
    (r"\sqrt2", "1.414"),
    (r"\sqrt2", "1.414214567"),
    ("1/2^{98}", "1/2^{99}"),
    ("1/2^{99}", "1/2^{98}"),
    ("(0,1)", "(0,1.5)"),
    (r"\{1,2,3\}", r"\{2,3,4\}"),
    ("n=1,2,3", "n=2,3,4"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("4", r"4\sqrt{2}"),
    ("1+1/e", "1-1/e"),
    ("1e-12", "2e-12"),
    ("3, 2, 4", "2,3,4"),  # an order that is not ascending is meant
    ("(3, 2, 4)", "(2,3,4)"),
    (r"\{1, 2\}", r"\{1, 2, 2\}"),
    ("1,2,2", "1,1,2"),
    ("(0,1)", "[0,1]"),
    ("(0,1]", "[0,1)"),
    ("(0,1)", "0,1"),
    ("1000000", "1000001"),
    ("1234567", "1234567.5"),
    ("50", "0.5"),
    ("50%", "0.5%"),
    ("6m", "6"),
    ("2k", "2"),
    ("52_8", "52"),
    ("52_8", "52_9"),
    ("x=5", "y=5"),
    (r"\text{Evelyn}", "Navin"),
    (r"\text{(C)}", "B"),
    ("5", r"\text{five}"),
    ("5", "5, 6"),
    ("2k+2", "2k+3"),
    ("x^2", "x^3"),
    (r"k \ge 2", "k > 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("840", "840840"),
    ("0", "1/2^{300}"),
    ("2^{2000}", "2^{2000}+1"),
    ("1000000000000000", "1000000000000001"),
    ("1", "0.999999"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same_answer_in_another_form_is_right(gold: str, answer: str, verifier: Verifier) -> None:
    assert verifier.verify_now(gold, boxed(answer)).reason is Reason.SAME


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_another_answer_is_wrong_however_near(gold: str, answer: str, verifier: Verifier) -> None:
    assert not verifier.verify_now(gold, boxed(answer)).correct


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in SAME + DIFFERENT}))
def test_every_gold_answer_is_the_same_as_itself(gold: str, verifier: Verifier) -> None:
    assert verifier.verify_now(gold, boxed(gold)).correct


def test_whether_a_bare_list_has_an_order_can_be_said(verifier: Verifier) -> None:
    assert verifier.verify_now("3, 2, 4", boxed("2, 3, 4"), ordered=False).correct
    assert not verifier.verify_now("1, 2", boxed("2, 1"), ordered=True).correct


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{3}, then \boxed{5}", "5"),
        (r"\boxed{840} and \boxed{840}", "840"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{4", None),
        (r"\boxed{", None),
        ("answer: 5", None),
        (r"\boxed 5", None),
        (r"\boxed{\boxed{5}} so", "5"),
        (r"\boxed{\left\{ 1 \right.} so", r"\left\{ 1 \right."),
    ],
)
def test_the_last_box_counts(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I do not know", Reason.NO_BOX),
        ("answer: 5", Reason.NO_BOX),
        (r"\boxed{", Reason.NO_BOX),
        (r"\boxed{}", Reason.EMPTY),
        (r"\boxed{ $ }", Reason.EMPTY),
        (r"\boxed{\frac{1}{}}", Reason.UNREADABLE),
        (boxed("(" * 100_000), Reason.TOO_LONG),
        (boxed("(" * 900), Reason.UNREADABLE),
        (boxed("\0"), Reason.EMPTY),
        (boxed("\ud800"), Reason.UNREADABLE),
        (boxed(r"\boxed{5}"), Reason.SAME),
        (boxed("5\0"), Reason.SAME),
    ],
)
def test_a_malformed_answer_is_wrong_with_its_reason_and_counted(text: str, reason: Reason, verifier: Verifier) -> None:
    before = verifier.counts[reason]
    assert verifier.verify_now("5", text).reason is reason
    assert verifier.counts[reason] == before + 1


def test_many_boxes_are_no_way_to_hit_the_answer(verifier: Verifier) -> None:
    text = " ".join(boxed(str(k)) for k in range(10))
    assert [k for k in range(10) if verifier.verify_now(str(k), text).correct] == [9]


@pytest.mark.parametrize("gold", ["", "  ", "$$", "."])
def test_an_empty_gold_answer_is_refused(gold: str, verifier: Verifier) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        verifier.verify_now(gold, boxed("5"))


def test_an_answer_that_nobody_waited_for_is_not_given_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(num_workers=1)
    real = maths.select.poll

    class Interrupted:
        def register(self, *_: Any) -> None:
            pass

        def poll(self, *_: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(maths.select, "poll", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        verifier.verify_now(r"\sqrt2", boxed(r"\frac{2}{\sqrt2}"))
    monkeypatch.setattr(maths.select, "poll", real)
    assert not verifier.verify_now(r"\sqrt2", boxed(r"\sqrt3")).correct
    verifier.close()


HOSTILE = [
    "9^{9^{9^{9}}}",
    "((9^9)^{9999})^{9999}",
    "4^{111111111111111111/7}",
    r"\sqrt{" * 200 + "2" + "}" * 200,
    "9" * 1900 + "!",
    "10^{10^{10}}",
    "x^{x^{x^{x^{x^{99999}}}}}",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_an_answer_that_hangs_the_comparison_is_wrong_and_the_next_one_is_graded(answer: str) -> None:
    verifier = Verifier(num_workers=1, cpu_s=1.0)
    try:
        verdict = verifier.verify_now(r"\sqrt{2}", boxed(answer))
        assert not verdict.correct
        assert verdict.reason in (Reason.DIFFERENT, Reason.TIME_LIMIT, Reason.UNREADABLE, Reason.MEMORY_LIMIT)
        assert verifier.counts == {verdict.reason: 1}
        assert verifier.verify_now(r"\sqrt{2}", boxed(r"\frac{2}{\sqrt2}")).correct
    finally:
        verifier.close()


def test_running_out_of_time_is_told_apart_from_being_wrong() -> None:
    verifier = Verifier(num_workers=1, cpu_s=1.0)
    try:
        verifier.verify_now(r"\sqrt{2}", boxed(r"\sqrt3"))  # the worker has started: its start is not counted
        assert verifier.verify_now(r"\sqrt{2}", boxed("(10^{10^{8}})!")).reason is Reason.TIME_LIMIT
    finally:
        verifier.close()


def test_running_out_of_memory_is_told_apart_from_an_answer_that_cannot_be_read(verifier: Verifier) -> None:
    assert verifier.verify_now(r"\sqrt{2}", boxed("(10^{10^{9}})!")).reason is Reason.MEMORY_LIMIT  # 400 MB of digits
    assert verifier.verify_now(r"\sqrt{2}", boxed(r"\frac{2}{\sqrt2}")).correct


def test_verdicts_are_the_same_from_threads_and_event_loops(verifier: Verifier) -> None:
    gold, text = r"\frac{\pi}{3}", boxed(r"\pi/3")
    found: list[Verdict] = [verifier.verify_now(gold, text)]
    thread = threading.Thread(target=lambda: found.append(verifier.verify_now(gold, text)))
    thread.start()
    thread.join()

    async def several() -> list[Verdict]:
        return list(await asyncio.gather(*(verifier.verify(gold, text) for _ in range(5))))

    found += asyncio.run(several())
    found += asyncio.run(several())
    assert [verdict.correct for verdict in found] == [True] * 12


def test_the_shared_verifier_answers(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> None:
    monkeypatch.setattr(maths, "SHARED", verifier)
    assert asyncio.run(maths.verify("5", boxed("5"))).correct
    assert not maths.verify_now("5", boxed("6")).correct


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("raise RuntimeError('no parser')", "ended"),
        ("import os; os.kill(os.getpid(), 9)", "ended"),
        ("input(); print('rubbish')", "it wrote"),
    ],
)
def test_a_worker_that_fails_is_an_error_and_no_wrong_answer(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    real = maths.subprocess.Popen

    def broken(arguments: list[str], **more: Any) -> Any:
        started.append(command)
        return real([arguments[0], "-c", command], **more)

    monkeypatch.setattr(maths.subprocess, "Popen", broken)
    verifier = Verifier(num_workers=1)
    with pytest.raises(SandboxError, match=message):
        verifier.verify_now(r"\sqrt2", boxed(r"\sqrt3"))
    assert len(started) == 2, "tried once more on a fresh process"
    assert not verifier.counts
    monkeypatch.undo()
    assert not verifier.verify_now(r"\sqrt2", boxed(r"\sqrt3")).correct
    verifier.close()
