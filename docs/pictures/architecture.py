"""Draws docs/pictures/architecture.svg from the imports: the order of the work in a run, and the packages by layers.

    python docs/pictures/architecture.py    # or: make drawing

An arrow points from a package to a package that it imports. Arrows that follow from others are left out.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
PATH = {  # each stage, and the package or module that does it
    "config": "config", "data": "data", "rollout": "rollout.engine", "rewards": "rewards.call",
    "advantages": "loss.advantages", "batch": "policy.micro_batches", "policy": "policy.model", "loss": "loss.losses",
    "optimizer": "trainer.optim", "run folder": "run.folder",
}  # fmt: skip
WIDTH, BOX, HEIGHT, ROW, TOP = 1080, 110, 34, 74, 132


def package_of(module: str) -> str | None:
    """Return the package of fastgrpo.PACKAGE.MODULE, None without one. Top-level modules are commands, except ranks."""
    name = module.split(".")[1]
    if name in ("kernels", "ranks") or (ROOT / "fastgrpo" / name).is_dir():
        return name
    return "commands" if not name.startswith("_") and (ROOT / "fastgrpo" / f"{name}.py").is_file() else None


def imports() -> dict[str, set[str]]:
    """Return for each package the packages that it imports."""
    found = {}
    for file in sorted([*(ROOT / "fastgrpo").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]):
        base = ROOT if file.parent.name == "kernels" else ROOT / "fastgrpo"
        mine = package_of(".".join(("fastgrpo", *file.relative_to(base).with_suffix("").parts)))
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            found.setdefault(mine, set()).update(package_of(name) for name in names if name.startswith("fastgrpo."))
    return {mine: packages - {mine, None} for mine, packages in found.items() if mine}


def draw() -> str:
    """Return the picture as SVG."""
    arrows, out, place, stages = imports(), [], {}, {}
    for i, (stage, module) in enumerate(PATH.items()):
        if not (ROOT / "fastgrpo" / module.replace(".", "/")).with_suffix(".py" if "." in module else "").exists():
            raise ValueError(f"PATH names fastgrpo.{module}, which does not exist")
        stages.setdefault(package_of(f"fastgrpo.{module}"), []).append(str(i + 1))
        x = WIDTH / len(PATH) * i + 3
        out += _box(x, 34, 92, [f"{i + 1} {stage}", module], True)
        out += [_arrow(x - 15, 34 + HEIGHT / 2, x - 1, 34 + HEIGHT / 2)] if i else []

    @cache
    def layer(package):
        return 1 + max(map(layer, arrows[package]), default=-1)

    @cache
    def reached(package):
        return arrows[package].union(*map(reached, arrows[package]))

    def middle(package):
        users = [place[user][0] for user in place if package in arrows[user]]
        return sum(users) / max(len(users), 1), package

    top = max(map(layer, arrows))
    for level in range(top, -1, -1):
        row = sorted((package for package in arrows if layer(package) == level), key=middle)
        place |= {package: (WIDTH * (i + 0.5) / len(row), TOP + ROW * (top - level)) for i, package in enumerate(row)}
    for package, (x, y) in place.items():
        direct = [
            other for other in sorted(arrows[package]) if not any(other in reached(way) for way in arrows[package])
        ]
        out += [_arrow(x, y + HEIGHT, place[other][0], place[other][1] - 1) for other in direct]
    for package, (x, y) in place.items():
        numbers = [f"stage {', '.join(stages[package])}"] if package in stages else []
        out += _box(x - BOX / 2, y, BOX, [package, *numbers], bool(numbers))
    height = TOP + ROW * top + HEIGHT + 12
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11.5"><defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="3" y="20" font-weight="bold">The order of the work in a run; each box names a module</text>',
        '<text x="3" y="106" font-weight="bold">The packages; arrows are imports</text>', *out, "</svg>\n",
    ])  # fmt: skip


def _box(x, y, width, lines, on_path):
    fill = "#dbe7f6" if on_path else "#f4f4f4"
    out = [f'<rect x="{x:.0f}" y="{y}" width="{width}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="#557"/>']
    for i, line in enumerate(lines):
        at, style = (28, 'font-size="9"') if i else (15 if lines[1:] else 21, 'font-weight="bold"')
        out.append(f'<text x="{x + width / 2:.0f}" y="{y + at}" text-anchor="middle" {style}>{line}</text>')
    return out


def _arrow(x1, y1, x2, y2):
    return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#777" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
