"""The declaration of an image model: a large model teaches a small one to classify, measure, embed or draw images."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, Literal

from isthmus.distill.labels import Binary, Calibration, Classes, Label, Number, attributes, can_balance
from isthmus.distill.language.objective import DeclaredTerm, objective_problems
from isthmus.distill.language.teachers import (
    FUNCTION,
    DeclaredTeacher,
    Onnx,
    Pretrained,
    TeacherFunction,
    TeacherOutputs,
    abstains,
    teacher_problems,
    teachers,
)
from isthmus.distill.language.text import LABEL_ONLY, Embedding
from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem, one_of

GAIN = "gain_on_labels"
"""Figure that a `Picture` with labels adds: the student's PSNR against the labels minus the control's, in dB."""


@dataclass(frozen=True, kw_only=True)
class MobileNet:
    """A student of inverted residual blocks, similar to MobileNetV3-Small (Howard et al., 2019, arXiv:1905.02244).

    It has no batch norm, so that an image's gradient does not depend on the other images of a batch.

    Attributes:
        width: factor of the number of channels, 1 for those of MobileNetV3-Small.
        depth: factor of the number of blocks.
    """

    width: float = 0.5
    depth: float = 1.0

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        sizes = asdict(self).items()
        return failed_checks(self, where, [(name, 0 < value <= 16, "more than 0, at most 16") for name, value in sizes])


@dataclass(frozen=True, kw_only=True)
class UNet:
    """A student for a `Picture`: a U-Net (Ronneberger et al., 2015, arXiv:1505.04597) of inverted residual blocks.

    It changes colors by a sum and a product, at first by little. The side of an image is a multiple of 8.

    Attributes:
        width: channels at half the size; a quarter and an eighth of the size have twice and four times as many.
        depth: number of blocks at an eighth of the size.
        expand: factor of channels inside a block.
    """

    width: int = 16
    depth: int = 4
    expand: int = 3

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        return failed_checks(self, where, [(name, value >= 1, "at least 1") for name, value in asdict(self).items()])


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image of the same size that the teacher draws. The student predicts `picture`, shaped like `image`.

    A String as the spine's label is the path of the wanted image, null where there is none. The student learns it with
    the weight 1 - `soft_weight`, and the control learns nothing else. A label of another type is ignored.

    Attributes:
        features: "module:function" that returns a frozen `torch.nn.Sequential` in eval mode. The outputs of
            its direct children, for the student's and the teacher's picture, are compared (`Perceptual`). None
            for no such loss.
        perceptual: weight of that loss; the mean absolute difference of the colors has 1.
        adversarial: weight of a discriminator that learns to tell the student's pictures from the teacher's.
    """

    features: str | None = None
    perceptual: float = 0.1
    adversarial: float = 0.0

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        known = self.features is None or bool(FUNCTION.fullmatch(self.features))
        finite = "a finite number of at least 0"
        checks = [
            ("features", known, '"module:function" or None'),
            ("perceptual", 0 <= self.perceptual < math.inf, finite),
            ("adversarial", 0 <= self.adversarial < math.inf, finite),
        ]
        return failed_checks(self, where, checks)


@dataclass(frozen=True, kw_only=True)
class Image:
    """Predict the label of an image, embed it, or draw another one: a large model teaches one that a device can run.

    Teacher and student get `image`, float32 (N, 3, side, side) from 0 to 1. It is the largest square in the middle of
    the file's image, scaled to `side` (bilinear, antialiased), with transparency dropped.

    Attributes:
        teacher: "module:function" or a `TeacherFunction` (a fitted one gets all training images at once), a
            `Pretrained`, whose image processor gets the images with 8 bits, an `Onnx` with a single input, a
            `TeacherOutputs`, or a list of these and of pairs (teacher, weight), whose weighted mean teaches.
        predicts: `Classes`, `Binary`, `Number`, `Picture` or `Embedding`. A Picture has teachers that answer with
            pictures, an Embedding a single one that answers with a vector per image.
        column: String feature with the path of a PNG or JPEG file, relative to the project; None for the student's only
            input.
        student: a `MobileNet`; for a Picture a `UNet`; or "module:function". The function takes the number of outputs
            n, for a Picture nothing, and returns a torch module from images to float32 (N, n) or to pictures.
        side: pixels of a side.
        augment: copies of each training image with another exposure and other colors, shifted by up to a tenth and
            mirrored half of the time. The teacher answers each copy. A copy keeps the label of its image, so do
            not use it if the label depends on brightness, color or place. A copy for a Picture has no label.
        mirror: False if a mirrored image would have another label.
        objective: terms of `isthmus.losses` that replace the losses of label and teacher; None for a Picture. This and
            the attributes below are as in `Text`.
    """

    teacher: "DeclaredTeacher | str | list[DeclaredTeacher | str | tuple[DeclaredTeacher | str, float]]"
    predicts: Label | Picture | Embedding = field(default_factory=Classes)
    column: str | None = None
    student: MobileNet | UNet | str = MobileNet()
    side: int = 64
    augment: int = 0
    mirror: bool = True
    objective: Sequence[DeclaredTerm] | None = None
    temperature: float = 2.0
    soft_weight: float = 0.7
    calibration: Calibration | None = None
    weight: str | None = None
    class_weight: Literal["balanced"] | None = None

    measured: ClassVar[tuple[str, ...]] = (GAIN,)

    @property
    def label(self) -> Label | Picture | Embedding:
        return self.predicts

    @property
    def student_functions(self) -> tuple[str, ...]:
        named = (self.student, self.predicts.features if isinstance(self.predicts, Picture) else None)
        return tuple(name for name in named if isinstance(name, str))

    @property
    def functions(self) -> tuple[str, ...]:
        named = [teacher.function for teacher, _ in teachers(self.teacher) if isinstance(teacher, TeacherFunction)]
        return (*named, *self.student_functions)

    def identity(self) -> dict[str, Any]:
        """Return every attribute that changes a student, except those with a fingerprint of their own."""
        values = {name: value for name, value in vars(self).items() if name not in ("teacher", "objective")}
        kinds: dict[str, Any] = {name: value for name, value in values.items() if is_dataclass(value)}
        return {**values, **{name: [type(kind).__name__, attributes(kind)] for name, kind in kinds.items()}}

    def shape_problems(self, where: str, values: Sequence[Any], name: str) -> list[Problem]:
        """Check values that a search may give the attribute `name` of the student; return problems, [] if all fit."""
        known = () if isinstance(self.student, str) else tuple(asdict(self.student))
        if isinstance(self.student, str) or name not in known:
            expected = one_of(known) if known else "a MobileNet or a UNet as the student"
            return [Problem(where, "is not part of the shape of the student", expected)]
        return [problem for value in values for problem in replace(self.student, **{name: value}).problems(where)]

    def problems(self, where: str) -> list[Problem]:
        named = ("predicts", "teacher", "objective", "calibration", "student", "class_weight")
        if wrong := type_problems(self, f"{where}: ", named):
            return wrong
        picture, embeds = isinstance(self.predicts, Picture), isinstance(self.predicts, Embedding)
        label = isinstance(self.predicts, Binary | Classes | Number)
        function = isinstance(self.student, str) and bool(FUNCTION.fullmatch(self.student))
        network = isinstance(self.student, UNet if picture else MobileNet)
        expected = f'a {"UNet" if picture else "MobileNet"} or "module:function"'
        known = isinstance(self.calibration, Calibration) and isinstance(self.predicts, self.calibration.labels)
        balances = self.class_weight == "balanced" and can_balance(self.predicts)
        checks = [
            ("predicts", picture or embeds or label, "Classes, Binary, Number, Picture or Embedding"),
            ("student", function or network, expected),
            ("side", (16 if picture else 8) <= self.side <= 4096, "8, for a Picture 16, to 4096"),
            ("side", not isinstance(self.student, UNet) or self.side % 8 == 0, "a multiple of 8, for a UNet"),
            ("augment", 0 <= self.augment <= 100, "0 to 100"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            ("soft_weight", 0 < self.soft_weight <= 1, "more than 0, at most 1"),
            ("calibration", self.calibration is None or known, f"None, or a calibration for {self.predicts}"),
            ("class_weight", self.class_weight is None or balances, '"balanced", for one class per row, or None'),
            ("weight", self.weight is None or not picture, "None, for a Picture"),
            ("objective", self.objective is None or not picture, "None, for a Picture"),
        ]
        if isinstance(self.predicts, Embedding):
            checks.append(("predicts", not self.predicts.index, "index=0: an index needs pairs of texts"))
            checks += [(name, getattr(self, name) == getattr(Image, name), "not set: it is for labels")
                       for name in LABEL_ONLY]  # fmt: skip
        problems = failed_checks(self, where, checks) + self._teacher_problems(f"{where}: teacher")
        problems += self.student.problems(f"{where}: student") if isinstance(self.student, MobileNet | UNet) else []
        problems += self.predicts.problems(f"{where}: predicts") if label or picture or embeds else []
        return problems or objective_problems(self, where)

    def _teacher_problems(self, where: str) -> list[Problem]:
        if self.teacher is None:
            return [Problem(where, "None", 'a teacher, such as "module:function"')]
        if wrong := teacher_problems(self.teacher, where):
            return wrong
        kinds = [type(teacher) for teacher, _ in teachers(self.teacher)]
        if self.augment and TeacherOutputs in kinds:
            found = "TeacherOutputs have no answers for augmented copies"
            wrong.append(Problem(where, found, "augment=0, or a teacher that can be called"))
        for teacher, _ in teachers(self.teacher):
            if isinstance(teacher, Pretrained) and (teacher.column, teacher.tokens) != (None, None):
                wrong.append(Problem(where, repr(teacher)[:200], "no column and no tokens: it reads images"))
        if isinstance(self.predicts, Picture) and (abstains(self.teacher) or not {*kinds} <= {TeacherFunction, Onnx}):
            expected = 'a "module:function" or an Onnx that answers every image, for a Picture'
            wrong.append(Problem(where, repr(self.teacher)[:200], expected))
        if isinstance(self.predicts, Embedding) and (len(kinds) > 1 or abstains(self.teacher)):
            expected = "one teacher that answers every image, whose vectors are learned"
            wrong.append(Problem(where, repr(self.teacher)[:200], expected))
        return wrong

    def spine_problems(self, where: str, spine: Spine) -> list[Problem]:
        """Return a problem if the label column of the spine has a type that the kind of label cannot be."""
        return self.predicts.spine_problems(where, spine, self.weight) if isinstance(self.predicts, Label) else []
