"""The one comparison of HumanEval+ and MBPP+, written without numpy, which their tests import for it alone.

Like ``literals`` this file also travels into the sandbox, where tests that run as a whole call ``assertion``.
"""

from __future__ import annotations

TOLERANCE = 1e-6
RELATIVE = 1e-7


def evalplus_same(value: object, expected: object, atol: float) -> bool:
    """Return whether a value is the expected one as EvalPlus compares: equal, or floats near each other.

    A float, or a list or tuple of floats, is compared with an absolute tolerance (``atol``, or 1e-6 where it is 0) and
    a relative one of 1e-7. Unlike there, lists must have the same length: nothing is stretched to fit.
    """
    if value == expected:
        return True
    pairs = [(value, expected)]
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        if len(expected) != len(value):
            return False
        pairs = list(zip(value, expected, strict=True))
    if atol == 0 and not all(isinstance(wanted, float) for _, wanted in pairs):
        return False
    limit = atol or TOLERANCE
    return all(
        isinstance(got, int | float)
        and isinstance(wanted, int | float)
        and (got == wanted or abs(got - wanted) <= limit + RELATIVE * abs(wanted))
        for got, wanted in pairs
    )


def assertion(out: object, exp: object, atol: float) -> None:
    """Raise ``AssertionError`` unless ``out`` is the same as ``exp``."""
    assert evalplus_same(out, exp, atol)
