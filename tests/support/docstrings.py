"""Compares the docstrings of public functions and classes with their signatures, by reading the source alone.

python tests/support/docstrings.py FILE...      prints what is missing in these modules
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import docstring_parser

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fastgrpo", "kernels")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Offence(NamedTuple):
    """A place where the rules are broken.

    Attributes:
        line: Line number of the definition, counted from 1.
        name: Qualified name of the function or class, such as `Policy.gather`.
        reason: What is missing or superfluous.
    """

    line: int
    name: str
    reason: str


class Bases:
    """The project's classes by name, to find out what a method overrides.

    Args:
        trees: Parsed modules in which the classes are defined.
    """

    def __init__(self, trees: Iterable[ast.Module]):
        self.classes: dict[str, list[ast.ClassDef]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append(node)

    def of(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yield the classes of the project that a class inherits from, nearest first.

        Args:
            node: A class definition.
        """
        for base in node.bases:
            for found in self.classes.get(_last_name(base), []):
                if found is not node:
                    yield found
                    yield from self.of(found)

    def documents(self, node: ast.ClassDef, method: str) -> bool:
        """Tell whether a base class in the project has a docstring for a method.

        Args:
            node: The class that overrides the method.
            method: The method's name.
        """
        return any(f.name == method and ast.get_docstring(f) for base in self.of(node) for f in _functions(base.body))


def offences(tree: ast.Module, bases: Bases | None = None) -> list[Offence]:
    """List what is wrong with the docstrings and annotations of a module's public functions and classes.

    Args:
        tree: The parsed module.
        bases: The classes whose methods may be overridden without a docstring; by default the module's own.
    """
    bases = bases or Bases([tree])
    found: list[Offence] = []

    def note(node: Function | ast.ClassDef, name: str, reasons: Iterator[str]) -> None:
        try:
            found.extend(Offence(node.lineno, name, reason) for reason in reasons)
        except docstring_parser.ParseError as error:
            found.append(Offence(node.lineno, name, f"docstring is not Google style: {error}"))

    for node in _definitions(tree.body):
        if node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            note(node, node.name, _of_class(node, bases))
            for method in _functions(node.body):
                note(method, f"{node.name}.{method.name}", _of_method(method, node, bases))
        else:
            note(node, node.name, _of_function(node))
    return found


def project() -> tuple[dict[Path, ast.Module], Bases]:
    """Parse all modules whose docstrings are held to the rules.

    Returns:
        The syntax tree of each module by its path, and the classes of all of them.
    """
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    return trees, Bases(trees.values())


def _of_function(node: Function) -> Iterator[str]:
    if not _decorated(node, "jit"):
        yield from _annotations(node, skip=0)
    yield from _arguments(ast.get_docstring(node), _parameters(node))


def _of_method(node: Function, owner: ast.ClassDef, bases: Bases) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    skip = 0 if _decorated(node, "staticmethod") else 1
    if node.name == "__init__":
        if docstring:
            yield "__init__ has a docstring: document the constructor's parameters in that of the class"
        yield from _annotations(node, skip, returns=False)
    elif node.name.startswith("_") or _decorated(node, "setter") or _decorated(node, "overload"):
        return
    elif _decorated(node, "property") or _decorated(node, "cached_property"):
        yield from _annotations(node, skip)
        if not docstring:
            yield "has no docstring"
    elif node.name in ("forward", "backward") and "Function" in map(_last_name, owner.bases):
        # `ctx` is torch's. Whoever calls `apply` reads the Args, if there are any; a docstring is not asked for.
        if docstring and _documented(docstring, "param"):
            yield from _arguments(docstring, _parameters(node)[1:])
    else:
        yield from _annotations(node, skip)
        if docstring or not bases.documents(owner, node.name):
            yield from _arguments(docstring, _parameters(node)[skip:])


def _of_class(node: ast.ClassDef, bases: Bases) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        yield "has no docstring"
        return
    if _decorated(node, "dataclass") or "NamedTuple" in map(_last_name, node.bases):
        fields, settings = _fields(node)
        yield from _compare("Attributes", _documented(docstring, "attribute"), fields, optional=settings)
        if _documented(docstring, "param"):
            yield "documents its fields under `Args:`; they belong under `Attributes:`"
        return
    own = [f for f in _functions(node.body) if f.name == "__init__"]
    inherited = [f for base in bases.of(node) for f in _functions(base.body) if f.name == "__init__"]
    if own:
        yield from _compare("Args", _documented(docstring, "param"), _parameters(own[0])[1:])
    elif documented := _documented(docstring, "param"):
        # A class that inherits its constructor may say again what the parameters are.
        yield from _compare("Args", documented, _parameters(inherited[0])[1:] if inherited else [])


def _annotations(node: Function, skip: int, returns: bool = True) -> Iterator[str]:
    bare = [a.arg for a in _all_arguments(node)[skip:] if a.annotation is None]
    if bare:
        yield f"parameters without annotation: {', '.join(bare)}"
    if returns and node.returns is None:
        yield "has no return annotation"


def _arguments(docstring: str | None, parameters: list[str]) -> Iterator[str]:
    if not docstring:
        yield "has no docstring"
        return
    yield from _compare("Args", _documented(docstring, "param"), parameters)


def _compare(section: str, documented: list[str], expected: list[str], optional: Iterable[str] = ()) -> Iterator[str]:
    missing = [name for name in expected if name not in documented]
    unknown = [name for name in documented if name not in expected and name not in optional]
    twice = sorted({name for name in documented if documented.count(name) > 1})
    if missing:
        yield f"not under `{section}:`: {', '.join(missing)}"
    if unknown:
        yield f"under `{section}:` but no such name, one a line: {', '.join(map(repr, unknown))}"
    if twice:
        yield f"twice under `{section}:`: {', '.join(twice)}"


def _documented(docstring: str, kind: str) -> list[str]:
    """Names in the section for parameters ("param") or for attributes ("attribute")."""
    parsed = docstring_parser.parse(docstring, docstring_parser.DocstringStyle.GOOGLE)
    return [param.arg_name.lstrip("*") for param in parsed.params if param.args[0] == kind]


def _fields(node: ast.ClassDef) -> tuple[list[str], list[str]]:
    """Public fields of a dataclass or NamedTuple, and those of them that carry their help with `setting(...)`."""
    fields, settings = [], []
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if line.target.id.startswith("_") or "ClassVar" in ast.unparse(line.annotation):
            continue
        declared = isinstance(line.value, ast.Call) and _last_name(line.value.func) == "setting"
        (settings if declared else fields).append(line.target.id)
    return fields, settings


def _definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Definitions of a module or class, those under `if` and `try` too."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _definitions(node.body)
            yield from _definitions(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _definitions(handler.body)


def _functions(body: list[ast.stmt]) -> list[Function]:
    return [node for node in _definitions(body) if isinstance(node, Function)]


def _all_arguments(node: Function) -> list[ast.arg]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [argument for argument in every if argument is not None]


def _parameters(node: Function) -> list[str]:
    return [argument.arg for argument in _all_arguments(node)]


def _decorated(node: Function | ast.ClassDef, name: str) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return name in map(_last_name, decorators)


def _last_name(node: ast.expr) -> str:
    """`Function` of `torch.autograd.Function`, `Source` of `Source[int]`."""
    return ast.unparse(node).split("[")[0].split(".")[-1]


def main(arguments: list[str]) -> int:
    """Print the offences of the named files, or of the whole project.

    Args:
        arguments: Paths of modules; none means all modules of the project.

    Returns:
        1 if anything was found, else 0.
    """
    trees, bases = project()
    named = {Path(name): ast.parse(Path(name).read_text()) for name in arguments}
    bases = Bases([*trees.values(), *named.values()]) if named else bases
    count = 0
    for path, tree in (named or trees).items():
        for line, name, reason in offences(tree, bases):
            print(f"{path}:{line}: {name}: {reason}")
            count += 1
    print(f"{count} offences")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
