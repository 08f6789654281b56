"""The programs that run in the sandbox, as text: the driver beside a candidate, the judge beside a test.

Neither holds an expected value that the other could see: the driver gets the candidate and the calls to make, the judge
gets the test and the answers as plain data.
"""

from __future__ import annotations

from pathlib import Path

CODEC = Path(__file__).with_name("literals.py").read_text(encoding="utf-8")
EVALPLUS = Path(__file__).with_name("evalplus.py").read_text(encoding="utf-8")

LEETCODE_NAMES = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
pow = __import__("builtins").pow
"""

DRIVER = r"""
import json, os, sys, types

def work():
    job = json.loads(sys.stdin.buffer.read())
    channel = os.fdopen(os.dup(1), "w")  # answers go where no print of the program goes
    os.dup2(2, 1)
    codec = types.ModuleType("codec")
    exec(job["codec"], codec.__dict__)
    program = types.ModuleType("solution")
    sys.modules["solution"] = program
    names = program.__dict__
    for number, text in enumerate(job["texts"]):
        exec(compile(text, f"<program {number}>", "exec", dont_inherit=True), names)

    def say(line):
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    def answer(call):
        if "expression" in call:
            return eval(compile(call["expression"], "<call>", "eval", dont_inherit=True), names)
        name = call["name"]
        if name not in names and "Solution" in names:
            function = getattr(names["Solution"](), name)
        elif name in names:
            function = names[name]
        else:
            raise NameError(f"the program defines no function {name!r}")
        return function(*codec.decode(call["args"]), **codec.decode(call["kwargs"]))

    say(["ready"])
    for call in job["calls"]:
        try:
            line = ["value", codec.encode(answer(call))]
        except codec.NotLiteralError as error:
            line = ["unreadable", str(error)[:200]]
        except (Exception, SystemExit) as error:
            line = ["raised", type(error).__name__, str(error)[:200]]
        say(line)

work()
"""

JUDGE = r"""
import builtins, importlib, json, os, random, sys, types

class NeedsAnswer(BaseException):
    pass

class Unreadable(BaseException):
    pass

class Missing:
    "Stands where an answer is missing: whoever looks at it needs the answer."

def needs_answer(*args, **kwargs):
    raise NeedsAnswer

for word in '''
    abs add and bool bytes call complex contains delitem divmod enter eq float floordiv format ge getattr getitem gt
    hash index int invert iter le len lt matmul mod mul ne neg next or pos pow radd rdivmod repr rfloordiv rmod rmul
    round rpow rshift rsub rtruediv setitem str sub truediv trunc xor
'''.split():
    setattr(Missing, f"__{word}__", needs_answer)

def work():
    job = json.loads(sys.stdin.buffer.read())
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    codec = types.ModuleType("codec")
    exec(job["codec"], codec.__dict__)
    answers = job["answers"]
    needed = []
    raised = []

    def stub(name):
        def call(*args, **kwargs):
            try:
                wanted = {"name": name, "args": codec.encode(args), "kwargs": codec.encode(kwargs)}
            except codec.NotLiteralError:
                if needed:
                    raise NeedsAnswer
                raise
            key = json.dumps(wanted, sort_keys=True)
            if key not in answers:
                if wanted not in needed:
                    needed.append(wanted)
                raise NeedsAnswer
            kind, *rest = answers[key]
            if kind == "value":
                return codec.decode(rest[0])
            if kind == "unreadable":
                raise Unreadable(rest[0])
            error = getattr(builtins, rest[0], None)
            known = isinstance(error, type) and issubclass(error, Exception)
            raised.append((error if known else RuntimeError)(rest[1]))
            raise raised[-1]
        return call

    test = types.ModuleType("test")
    sys.modules["test"] = test
    names = test.__dict__
    names.update(NeedsAnswer=NeedsAnswer, Missing=Missing)
    for name in job["modules"]:
        names[name] = importlib.import_module(name)
    random.seed(0)
    result = ["passed"]
    try:
        for text in job["preludes"]:
            exec(compile(text, "<prelude>", "exec", dont_inherit=True), names)
        for name in job["stubs"]:
            names[name] = stub(name)
        exec(compile(job["test"], "<test>", "exec", dont_inherit=True), names)
    except NeedsAnswer:
        pass
    except Unreadable as error:
        result = ["failed", f"the program returned {error}"]
    except ModuleNotFoundError as error:
        of_program = any(error is other for other in raised)
        result = ["failed" if of_program else "missing", str(error)]
    except (Exception, SystemExit) as error:
        result = ["failed", f"{type(error).__name__}: {error}"[:200]]
    channel.write(json.dumps(["needs", needed] if needed else result) + "\n")
    channel.flush()

work()
"""
