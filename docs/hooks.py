"""Hooks of the site: links out of docs/, the notebook as a page, and names that are loaded lazily.

Pages link to files of the repository, such as ../CONTRIBUTING.md or ../kernels/head.py. The site has no address of a
repository, so it shows these files itself, below repository/: Markdown as pages, Python and the like as pages of code,
folders as lists of their files, pictures and data unchanged. A broken link, and a public name without a page in the
API reference, are warnings, which fail a strict build.
"""

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LOG = logging.getLogger("mkdocs.hooks.docs")  # mkdocs counts warnings of loggers below its own
SHOWN = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".txt": "text", "": "text"}
CONTRIBUTING = "CONTRIBUTING.md"
# Blocks and spans of code, which hold no links, or the target of a link or a picture within the repository.
LINK = re.compile(
    r"(?ms)^ *(```+).*?^ *\1|(`+)[^\n]*?\2|(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))"
)
PUBLIC = (  # modules below fastgrpo whose names the API reference has
    "", "config", "data", "loss", "rewards", "rollout", "rollout.backend", "trainer", "evaluation.estimators",
    "evaluation.heldout", "integrations.liger", "integrations.trl", "integrations.verl",
)  # fmt: skip
HIDDEN = "---\nsearch: {exclude: true}\n---\n"  # the search finds prose, not lines of sources


def site_uri(path: Path, root: Path) -> str:
    """Return where the site keeps a file or folder of the repository, as a path below docs/."""
    name = path.relative_to(root).as_posix()
    uri = name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name}"
    if path.suffix == ".ipynb":
        return uri.removesuffix(".ipynb") + ".md"
    return f"{uri}.md" if path.is_dir() or path.suffix in SHOWN else uri


def text_of(path: Path, root: Path) -> str | None:
    """Return the Markdown that shows a file or folder, or None for a file that the site copies."""
    if path.suffix == ".md":
        return path.read_text()
    if path.suffix == ".ipynb":
        download = f'<a href="{path.name}" download>Download this notebook</a>'
        return "\n\n".join([*_cells(json.loads(path.read_text())), download])
    title = f"{HIDDEN}# {path.relative_to(root).as_posix()}\n\n"
    if path.is_dir():
        names = (file.name for file in sorted(path.iterdir()) if not file.name.startswith(("__pycache__", ".")))
        return title + "\n".join(f"- {name}" for name in names)
    return f"{title}`````{SHOWN[path.suffix]}\n{path.read_text()}\n`````\n" if path.suffix in SHOWN else None


def _cells(notebook: dict) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, each with its outputs."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"`````python\n{source}\n`````"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/plain")
            if "image/png" in data:
                yield f'<img alt="what the cell above draws" src="data:image/png;base64,{"".join(data["image/png"])}">'
            elif text:
                yield f"`````text\n{''.join(text)}\n`````"


def links(text: str, path: Path, root: Path) -> Iterator[tuple[re.Match, Path]]:
    """Yield the links of a page, the Markdown of `path`, to other files of the repository, each with its target."""
    for link in LINK.finditer(text):
        if link["path"]:
            target = Path(os.path.normpath(path.parent / link["path"]))
            if target.exists() and target.is_relative_to(root):
                yield link, target
            else:
                LOG.warning("%s links to %s, which is not there", path.relative_to(root), link["path"])


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the targets of links, and the targets of their links."""
    docs = Path(config.docs_dir)
    root = docs.parent
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    waiting += [root / CONTRIBUTING, *docs.glob("*.ipynb")]
    while waiting:
        path = waiting.pop()
        uri, text = site_uri(path, root), text_of(path, root)
        if uri not in files.src_uris:
            made = {"abs_src_path": str(path)} if text is None else {"content": text}
            shown = InclusionLevel.INCLUDED if path.name == CONTRIBUTING else InclusionLevel.NOT_IN_NAV
            file = File.generated(config, uri, inclusion=shown, **made)
            file.source = path
            files.append(file)
        if path.suffix in (".md", ".ipynb"):
            waiting += [target for _, target in links(text, path, root) if site_uri(target, root) not in files.src_uris]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a page's links to files of the repository into links to their pages on the site."""
    root = Path(config.docs_dir).parent
    path = getattr(page.file, "source", None) or Path(page.file.abs_src_path)
    if path.suffix not in (".md", ".ipynb"):
        return markdown
    here, parts, end = os.path.dirname(page.file.src_uri), [], 0
    for link, target in links(markdown, path, root):
        uri = os.path.relpath(site_uri(target, root), here or ".")
        parts += [markdown[end : link.start()], uri, link["anchor"] or ""]
        end = link.end()
    return "".join([*parts, markdown[end:]])


class Names(griffe.Extension):
    """Shows griffe, which reads only the source, the names that packages load on first use, and the kernels."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Add the names that a package has after its import. Other versions of griffe pass other `kwargs`."""
        if pkg.path == "fastgrpo":
            _add_kernels(pkg, loader)
            _add_lazy_names(pkg)


def _add_kernels(package, loader):
    """Put the folder kernels/ into the package, as fastgrpo/__init__.py does where the package is imported."""
    folder = package.filepath.parent.parent / "kernels"
    kernels = griffe.Module("kernels", filepath=[folder], parent=package, modules_collection=loader.modules_collection)
    package.set_member("kernels", kernels)
    for path in sorted(folder.glob("*.py")):
        module = griffe.visit(
            path.stem, path, path.read_text(), extensions=loader.extensions, parent=kernels,
            docstring_parser=loader.docstring_parser, docstring_options=loader.docstring_options,
            lines_collection=loader.lines_collection, modules_collection=loader.modules_collection,
        )  # fmt: skip
        kernels.set_member(path.stem, module)


def _add_lazy_names(module):
    """Make an alias of each name in `_HOME` of a module, and of the modules in it."""
    if "_HOME" in module.members:
        homes = ast.literal_eval(str(module["_HOME"].value))
        for name, home in homes.items():
            module.set_member(name, griffe.Alias(name, f"{module.path}.{home}.{name}", parent=module))
        module.exports = list(homes)
    for inner in list(module.modules.values()):
        if not inner.is_alias:
            _add_lazy_names(inner)


def on_env(env: Any, *, config: MkDocsConfig, files: Files) -> None:
    """Warn of public names that the API reference does not document."""
    handlers = config.plugins["mkdocstrings"].handlers
    package = handlers.get_handler("python")._modules_collection.members.get("fastgrpo")
    for name in [] if package is None else public_names(package):  # None: no page has a part of the reference
        if name not in handlers.inventory:
            LOG.warning("%s is public, and no page of docs/api documents it", name)


def public_names(package: griffe.Module) -> Iterator[str]:
    """Yield the public names of the package, with the modules that people import them from.

    These are the exports of the modules in `PUBLIC`, or their definitions without a list of exports, and the functions
    of kernels/ that kernels/reference.py specifies.
    """
    for path in PUBLIC:
        module = package[path] if path else package
        names = module.exports or [name for name, member in module.members.items() if _is_definition(member)]
        yield from (f"{module.path}.{name}" for name in names if not name.startswith("__"))
    operations = {name for name, member in package["kernels.reference"].members.items() if _is_definition(member)}
    for module in package["kernels"].modules.values():
        yield from (f"{module.path}.{name}" for name in sorted(operations & set(module.functions)))


def _is_definition(member):
    return not member.is_alias and not member.name.startswith("_") and (member.is_function or member.is_class)
