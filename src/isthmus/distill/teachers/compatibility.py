"""What is checked of a teacher and a student before the first step: all problems at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.distill.shapes import agree, floats
from isthmus.distill.teachers.teacher import BY_CLASS, Teacher, misfit
from isthmus.features.errors import ConfigurationError, DataError, Problem

HARD_TEXTS = (
    "",
    " ",
    "The quick brown fox",
    "naïve café, Ångström, cafe\u0301",
    "ﬁnal ½ ﷺ Ⅷ",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "東京都 北京 서울",
    "مرحبا بالعالم",
    "a\tb\r\nc\u200bd\x00e\ufeff",
    "[CLS] [SEP] <s> </s> <|endoftext|>",
    "3.14159 -1e-10 0xFF",
    "don't can't U.S.A.",
    "word " * 3000,
    "x" * 5000,
)
"""Texts on which tokenizers differ that differ at all: accents, joined emoji, no spaces, none of it, and very long."""


def compatible(
    teacher: Teacher,
    batch: Any,
    outputs: Mapping[str, str],
    *,
    labels: Sequence[str] | None = None,
    student: nn.Module | None = None,
    tokenizers: tuple[Any, Any] | None = None,
) -> Teacher:
    """The teacher with its classes in the order of the student's labels, if it fits the student.

    Args:
        teacher: is asked twice.
        batch: a few rows.
        outputs: the outputs that are needed, with their sizes in words, as in "rows 3" or "rows tokens 768": a number
            must be met, a word stands for the same size everywhere.
        labels: the student's, in the order of its logits. The teacher's own may be in another order.
        student: must not share a parameter with the teacher.
        tokenizers: the teacher's and the student's: of transformers, of tokenizers, or functions from text to ids.

    Raises:
        ConfigurationError: with every problem.
    """
    problems: list[Problem] = []
    answers: dict[str, Tensor] = {}
    try:
        answers = teacher.ask(batch)
        problems += _unsteady(answers, teacher.ask(batch))
    except ConfigurationError as error:
        problems += error.problems
    except DataError as error:
        problems.append(Problem(error.where, error.found, error.expected))
    absent = [key for key in outputs if key not in teacher.keys]
    problems += [Problem(f"output {key}", f"it gives {', '.join(teacher.keys)}", key) for key in absent]
    try:
        agree("outputs", **{key: floats(answers[key], layout) for key, layout in outputs.items() if key in answers})
    except ConfigurationError as error:
        problems += [Problem(f"output {p.where}", p.found, p.expected) for p in error.problems]
    if labels is not None:
        problems += [
            Problem(
                f"output {key}",
                f"{answers[key].shape[-1] if answers[key].ndim > 1 else 'no'} classes",
                f"{len(labels)}, one for each label",
            )
            for key in BY_CLASS
            if key in answers and (answers[key].ndim < 2 or answers[key].shape[-1] != len(labels))
        ]
        if teacher.labels is not None and (problem := misfit(teacher.labels, labels)):
            problems.append(problem)
    if student is not None:
        problems += _shared(teacher, student)
    if tokenizers is not None:
        problems += differing_tokens(*tokenizers)
    if problems:
        raise ConfigurationError(teacher.where, problems)
    return teacher if labels is None or teacher.labels is None else teacher.relabelled(labels)


def differing_tokens(teacher: Any, student: Any, texts: Sequence[str] = HARD_TEXTS) -> list[Problem]:
    """On which texts two tokenizers give other ids, and how their vocabularies differ."""
    problems = []
    words: list[dict[str, int]] = [getattr(tokenizer, "get_vocab", dict)() for tokenizer in (teacher, student)]
    if all(words) and words[0] != words[1]:
        word, place = min(words[0].items() ^ words[1].items())
        whose = "the teacher's" if words[0].get(word) == place else "the student's"
        said = f"{len(words[0])} words; {word!r} is {place} in {whose} alone"
        problems.append(Problem("vocabulary", said, f"the student's {len(words[1])}"))
    for text in texts:
        found, expected = ids(teacher, text), ids(student, text)
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            place = next((n for n, (a, b) in pairs if a != b), min(len(found), len(expected)))
            shown = repr(text if len(text) <= 40 else text[:40] + "…")
            problems.append(
                Problem(
                    f"tokens of {shown}",
                    f"{len(found)} ids, from place {place} on {found[place : place + 5]}",
                    f"{len(expected)} ids, from there on {expected[place : place + 5]}",
                )
            )
    return problems


def ids(tokenizer: Any, text: str) -> list[int]:
    """What a tokenizer makes of a text."""
    encoding = getattr(tokenizer, "encode", None)
    if encoding is None:
        given = tokenizer(text)
    elif callable(tokenizer):  # of transformers, which would print that a text is longer than its model reads
        given = encoding(text, verbose=False)
    else:
        given = encoding(text)
    return [int(number) for number in getattr(given, "ids", given)]


def _unsteady(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Problem]:
    # Not to the bit: a GPU may add up in another order.
    return [
        Problem(f"output {key}", "two answers to the same batch differ", "the same answer: no dropout, no drawing")
        for key, answer in first.items()
        if answer.shape != second[key].shape or not torch.allclose(answer, second[key], rtol=1e-3, atol=1e-4)
    ]


def _shared(teacher: Teacher, student: nn.Module) -> list[Problem]:
    # Not by `parameters()`: a teacher that is not held any more is a problem already.
    own = {id(weight) for weight in teacher._weights()}
    both = [name for name, parameter in student.named_parameters() if id(parameter) in own]
    return [Problem(f"parameter {both[0]} of the student", f"is the teacher's, with {len(both)} in all", "its own copy")
            ] if both else []  # fmt: skip


agreed = compatible  # its name in version 0.1
