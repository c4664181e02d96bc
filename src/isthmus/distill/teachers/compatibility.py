"""Checks, before the first step, that teacher and student fit; reports all problems together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.distill.shapes import check_tensors, floats
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
"""Texts for which tokenizers often differ: accents, joined emoji, no spaces, empty and very long texts."""


def compatible(
    teacher: Teacher,
    batch: Any,
    outputs: Mapping[str, str],
    *,
    labels: Sequence[str] | None = None,
    student: nn.Module | None = None,
    tokenizers: tuple[Any, Any] | None = None,
) -> Teacher:
    """Check before training that a teacher fits a student; return the teacher, with its classes in the student's order.

    Args:
        teacher: teacher to check. It is called twice, and must return the same outputs.
        batch: a few rows, in the form that the teacher takes.
        outputs: layout of each output that the teacher must have, by key, such as "rows 3" or "rows tokens 768". A
            number is an exact size. A word is a size that must be equal in all layouts.
        labels: class names in the order of the student's logits; None for a student without class names. The teacher
            must have the same classes, in any order.
        student: network that must not share a parameter with the teacher; None to skip this check.
        tokenizers: tokenizers of teacher and student, which must return the same ids: objects of the transformers or
            tokenizers library, or functions from text to ids. None to skip this check.

    Raises:
        ConfigurationError: lists every problem.
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
        check_tensors(
            "outputs", **{key: floats(answers[key], layout) for key, layout in outputs.items() if key in answers}
        )
    except ConfigurationError as error:
        problems += [Problem(f"output {p.where}", p.found, p.expected) for p in error.problems]
    if labels is not None:
        classes = {key: answers[key].shape[-1] if answers[key].ndim > 1 else "no" for key in BY_CLASS if key in answers}
        problems += [
            Problem(f"output {key}", f"{number} classes", f"{len(labels)}, as many as labels")
            for key, number in classes.items()
            if number != len(labels)
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
    problems = []
    words: list[dict[str, int]] = [getattr(tokenizer, "get_vocab", dict)() for tokenizer in (teacher, student)]
    if all(words) and words[0] != words[1]:
        word, place = min(words[0].items() ^ words[1].items())
        whose = "the teacher's" if words[0].get(word) == place else "the student's"
        difference = f"{len(words[0])} words; {word!r} is {place} in {whose} alone"
        problems.append(Problem("vocabulary", difference, f"the student's {len(words[1])}"))
    for text in texts:
        theirs, ours = ids(teacher, text), ids(student, text)
        if theirs != ours:
            pairs = enumerate(zip(theirs, ours, strict=False))
            place = next((n for n, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
            shown = repr(text if len(text) <= 40 else text[:40] + "…")
            found = f"{len(theirs)} ids, from position {place} on {theirs[place : place + 5]}"
            expected = f"{len(ours)} ids, from there on {ours[place : place + 5]}"
            problems.append(Problem(f"tokens of {shown}", found, expected))
    return problems


def ids(tokenizer: Any, text: str) -> list[int]:
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        encoding = tokenizer(text)
    else:  # verbose=False: transformers would warn about texts that are too long for the model
        encoding = encode(text, verbose=False) if callable(tokenizer) else encode(text)
    return [int(number) for number in getattr(encoding, "ids", encoding)]


def _unsteady(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Problem]:
    # Allow rounding: a GPU may add up in any order.
    return [
        Problem(f"output {key}", "two answers to the same batch differ", "the same answer: no dropout, nothing random")
        for key, answer in first.items()
        if answer.shape != second[key].shape or not torch.allclose(answer, second[key], rtol=1e-3, atol=1e-4)
    ]


def _shared(teacher: Teacher, student: nn.Module) -> list[Problem]:
    # `parameters()` would raise if the teacher is not frozen, which is reported elsewhere.
    own = {id(weight) for weight in teacher._weights()}
    both = [name for name, parameter in student.named_parameters() if id(parameter) in own]
    found = f"belongs to the teacher ({len(both)} shared in total)"
    return [Problem(f"parameter {name} of the student", found, "its own copy") for name in both[:1]]
