"""Public functions and classes are annotated, and their docstrings name exactly their parameters (Google style)."""

import ast
from textwrap import dedent

import docstrings
import pytest
from paths import ROOT

TREES, BASES = docstrings.project()

GOOD = {
    "function": '''
        def scale(x: float, *rest: float, by: float = 2.0, **more: float) -> float:
            """Scale a number.

                y = by * x

            Args:
                x: The number: any unit.
                rest: Further numbers, which are
                    ignored.
                by: Factor.
                more: Further factors.

            Returns:
                y: in the unit of x.

            Raises:
                ValueError: `by` is 0.
            """
        ''',
    "no parameters": '''
        def now() -> float:
            """Return the seconds since the epoch."""
        ''',
    "names with a leading underscore, nested functions": '''
        def _scale(x):
            pass

        class _Scale:
            def scale(self, x):
                pass

        def outer() -> None:
            """Do nothing."""
            def inner(x):
                pass
        ''',
    "class": '''
        class Scale:
            """Scales numbers.

            Args:
                by: Factor.
            """

            def __init__(self, by: float):
                self.by = by

            def __call__(self, x):
                return self.by * x

            def half(self, x: float) -> float:
                """Scale by half of the factor.

                Args:
                    x: The number.
                """

            @property
            def inverse(self) -> float:
                """The factor that undoes this one."""

            @staticmethod
            def one(x: float) -> float:
                """Return the number as it is.

                Args:
                    x: The number.
                """

            @classmethod
            def default(cls) -> "Scale":
                """Make a scale with factor 2."""

        class Double(Scale):
            """Scales by 2."""

            def half(self, x: float) -> float:
                return x
        ''',
    "fields": '''
        class Point(NamedTuple):
            """A place in the plane.

            Attributes:
                x: Metres to the right.
                y: Metres up.
            """

            x: float
            y: float = 0.0

        @dataclass(frozen=True)
        class Config:
            """Settings.

            Attributes:
                name: Of the run.
            """

            KINDS: ClassVar[tuple] = ()
            name: str
            rate: float = setting(1.0, "Learning rate.")
            _cache: dict = field(default_factory=dict)
        ''',
    "kernel": '''
        if HAS_TRITON:
            @triton.jit
            def tile(x, BLOCK: tl.constexpr):
                """Load a tile.

                Args:
                    x: Pointer.
                    BLOCK: Its width.
                """

        class Loss(torch.autograd.Function):
            """The loss as an autograd function."""

            @staticmethod
            def forward(ctx, hidden, weight):
                return hidden

            @staticmethod
            def backward(ctx, grad):
                """Return the gradients that the forward pass kept."""
        ''',
}

BAD = {
    "has no docstring": """
        def scale(x: float) -> float:
            return x
        """,
    "parameters without annotation: x, rest": '''
        def scale(x, *rest) -> float:
            """Scale a number.

            Args:
                x: The number.
                rest: More of them.
            """
        ''',
    "has no return annotation": '''
        def scale():
            """Do nothing."""
        ''',
    "not under `Args:`: y": '''
        def scale(x: float, y: float) -> float:
            """Scale a number.

            Args:
                x: The number.
            """
        ''',
    "not under `Args:`: x": '''
        def scale(x: float) -> float:
            """x: the number."""
        ''',
    "under `Args:` but no such name, one a line: 'z'": '''
        def scale(x: float) -> float:
            """Scale a number.

            Args:
                x: The number.
                z: A parameter that is gone.
            """
        ''',
    "not under `Args:`: x, y; under `Args:` but no such name, one a line: 'x, y'": '''
        def scale(x: float, y: float) -> float:
            """Scale a number.

            Args:
                x, y: The numbers.
            """
        ''',
    "not under `Args:`: by": '''
        class Scale:
            """Scales numbers."""

            def __init__(self, by: float):
                self.by = by
        ''',
    "not under `Args:`: by; __init__ has a docstring: document the constructor's parameters in that of the class": '''
        class Scale:
            """Scales numbers."""

            def __init__(self, by: float):
                """by: the factor."""
        ''',
    "has no docstring; has no return annotation": '''
        class Scale:
            """Scales numbers."""

            def half(self) -> float:
                return 1.0

            @property
            def inverse(self):
                """The factor that undoes this one."""
        ''',
    "not under `Attributes:`: x; documents its fields under `Args:`; they belong under `Attributes:`": '''
        class Point(NamedTuple):
            """A place on the line.

            Args:
                x: Metres to the right.
            """

            x: float
        ''',
    "not under `Attributes:`: name": '''
        @dataclass
        class Config:
            """Settings."""

            name: str
            rate: float = setting(1.0, "Learning rate.")
        ''',
    "docstring is not Google style: Expected a colon in 'where x is 0.'.": '''
        def invert() -> float:
            """Return 1 / x.

            Raises:
                where x is 0.
            """
        ''',
    "under `Args:` but no such name, one a line: 'bias'": '''
        class Loss(torch.autograd.Function):
            """The loss as an autograd function."""

            @staticmethod
            def forward(ctx, hidden):
                """Compute the loss.

                Args:
                    hidden: Hidden states.
                    bias: One that is gone.
                """
        ''',
}


def reasons(source):
    return "; ".join(reason for _, _, reason in docstrings.offences(ast.parse(dedent(source))))


@pytest.mark.parametrize("case", GOOD)
def test_what_follows_the_rules_passes(case):
    assert reasons(GOOD[case]) == ""


@pytest.mark.parametrize("expected", BAD)
def test_what_breaks_a_rule_is_named(expected):
    assert reasons(BAD[expected]) == expected


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_docstrings(path):
    found = docstrings.offences(TREES[path], BASES)
    lines = [f"{path.relative_to(ROOT)}:{line}: {name}: {reason}" for line, name, reason in found]
    assert not lines, "\n" + "\n".join(lines)
