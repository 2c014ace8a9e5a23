"""README, CONTRIBUTING and docs/: links, files and flags exist, and what is made from the code equals the code."""

import dataclasses
import importlib
import re
import runpy
from contextlib import suppress

import pytest
from paths import ROOT
from torch.distributed.run import get_args_parser

from benchmarks import architectures, plans, predictions, report, scale
from benchmarks.race import __main__ as race
from fastgrpo import chat, distill, doctor, evaluate, serve, sft, train
from fastgrpo import report as report_command
from fastgrpo.config.settings import TrainConfig
from fastgrpo.kernels.objectives import LOSS_TYPES

README = ROOT / "README.md"
MORE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES = [README, *MORE, *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path: path.read_text() for path in PAGES}
KERNELS = [*(ROOT / "kernels").glob("*.py")]
PUBLIC = ("fastgrpo", *(f"fastgrpo.{name}" for name in ("config", "data", "rewards", "trainer")))
NOW = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "bloom")  # the other architectures are slow
COMMANDS = [evaluate, chat, serve, sft, distill, doctor, report_command]


def anchors(text):
    """The headings of a page, as GitHub's links name them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    wrong = []
    for path, text in TEXTS.items():
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            linked = path.parent / name if name else path
            if not linked.exists() or (anchor and anchor not in anchors(linked.read_text())):
                wrong.append(f"{path.name}: {target}")
    assert not wrong


def test_files_in_code_spans_exist():
    """Capitals in a name stand for something else: TASK, MODULE."""
    names = r"`((?:fastgrpo|kernels|tests|benchmarks|docs)/[\w/.-]+)`"
    found = [(path, name) for path, text in TEXTS.items() for name in re.findall(names, text)]
    assert not [each for each in found if not re.search(r"[A-Z]{3}", each[1]) and not (ROOT / each[1]).exists()]


def test_flags_in_code_spans_exist(capsys):
    known = {f"--{field.name}" for field in dataclasses.fields(TrainConfig)}
    known |= {"--config", "--debug", "--model", "--check", *get_args_parser()._option_string_actions}  # of torchrun
    for command in (*COMMANDS, train):
        with suppress(SystemExit):
            command.main(["--help"])
        known.update(re.findall(r"(?<![\w-])--?\w+", capsys.readouterr().out))
    spans = [(path, span) for path, text in TEXTS.items() for span in re.findall(r"`(--[^`\n]+)`", text)]
    assert not [each for each in spans if not set(re.findall(r"--\w+", each[1])) <= known]


@pytest.mark.parametrize("name, made", [("settings", "page"), ("from-trl", "from_trl")])
def test_a_generated_page_equals_the_code(name, made):
    pages = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    assert pages[made]() == (ROOT / "docs" / f"{name}.md").read_text(), "run `make settings`"


@pytest.mark.parametrize(
    "name",
    [name if name in NOW else pytest.param(name, marks=pytest.mark.slow) for name in architectures.ARCHITECTURES],
)
def test_architectures_page_equals_the_tests(name):
    """The engine and training compute what the model's own forward pass computes, or refuse the model."""
    assert architectures.row(name) in TEXTS[ROOT / "docs" / "architectures.md"], "run `make pages`"


def shown():
    """The texts between <!-- NAME --> and its end of all pages, by name."""
    return dict(re.findall(r"<!-- ((?:bench:)?[\w-]+) -->\n(.*?)<!-- /", "\n".join(TEXTS.values()), re.DOTALL))


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if "LoRA" in x else x for x in plans.RUNS])
def test_the_table_of_fitting_runs_equals_the_plans_of_memory(name):
    assert plans.row(name) in TEXTS[ROOT / "docs" / "memory.md"], "run `python -m benchmarks.plans`"


@pytest.mark.slow
def test_the_table_of_scale_equals_the_plans_of_memory():
    assert shown()["scale"] == scale.table() + "\n", "run `python -m benchmarks.scale`"


def test_tables_of_benchmarks_equal_the_results():
    """They are what `python -m benchmarks.{predictions,report}` prints."""
    tables = {"predictions": predictions.table() + "\n"}
    for file in report.RESULTS.glob("*.jsonl"):
        found = report.newest(file)
        made = {name: report.table(rows, file.stem) for name, rows in found.items()}
        made["summary"] = report.summary(found)
        tables |= {f"bench:{name}-{file.stem}": f"{table}\n" for name, table in made.items()}
    raced = {name: rows for name in race.TASKS if (rows := race.newest(race.results(name)))}
    tables |= {f"bench:race-{name}-cpu": race.table(rows) + "\n" for name, rows in raced.items()}
    found = {name: table for name, table in shown().items() if name not in ("scale", "plans")}
    assert found.keys() == tables.keys()
    assert [name for name in found if found[name] != tables[name]] == [], "these are stale"


def test_the_figures_of_the_readme_are_those_of_the_results():
    found, runs = report.newest(report.RESULTS / "cpu.jsonl"), race.runs_of(race.newest(race.results("gym")))
    (mine, trl), (my_loss, trl_loss) = (
        [next(row for row in found[name] if row["variant"] == variant) for variant in ("fastgrpo", "trl")]
        for name in ("pretrained", "linear_grpo_loss")
    )
    figures = (
        f"**{trl['ms_p50'] / mine['ms_p50']:.2f} times** as fast", f"TRL {trl['trl'].rpartition('.')[0]}",
        f"{mine['peak_mib'] / trl['peak_mib']:.2f} times the memory", f"**{my_loss['peak_mib']:.0f} MiB**",
        f"{trl_loss['peak_mib']:,.0f} MiB", f"{trl_loss['ms_p50'] / my_loss['ms_p50']:.2f} times as fast",
        "**{:.0f} s** instead of {:.0f} s".format(*(race.middle(runs[by], 0.6) for by in ("fastgrpo", "TRL"))),
    )  # fmt: skip
    assert [figure for figure in figures if figure not in TEXTS[README]] == []


def test_the_drawing_of_the_packages_equals_the_imports():
    drawing = runpy.run_path(str(ROOT / "docs" / "pictures" / "architecture.py"))
    assert drawing["draw"]() == drawing["PICTURE"].read_text(), "run `make drawing`"


def test_the_page_of_the_architecture_lists_every_module():
    path, others = TEXTS[ROOT / "docs" / "architecture.md"].split("## Other packages")
    listed = {name: block for name, block in re.findall(r"### (\w+)\n.*?```text\n(.*?)```", path, re.DOTALL)}
    for folder in [ROOT / "kernels", *(file.parent for file in (ROOT / "fastgrpo").glob("*/__init__.py"))]:
        modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
        if folder.name in listed:
            assert {line.split()[0] for line in listed[folder.name].splitlines()} == modules, folder.name
        else:
            (line,) = re.findall(rf"^\| {folder.name} \|.*", others, re.MULTILINE)
            assert modules <= set(re.findall(r"\w+", line)), folder.name


def test_the_table_of_objectives_has_every_loss_type():
    table = TEXTS[ROOT / "docs" / "objectives.md"].split("## Loss types")[1].split("**")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(LOSS_TYPES)


def test_readme_has_at_most_750_words():
    assert len(TEXTS[README].split()) <= 750


def test_the_api_reference_has_exactly_the_public_names():
    documented = set()
    for path in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)", TEXTS[path], re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            try:
                thing = importlib.import_module(name)
            except ModuleNotFoundError:
                thing = getattr(importlib.import_module(module), attribute)
            documented |= {id(thing), *(id(value) for key, value in vars(thing).items() if not key.startswith("_"))}
    for package in map(importlib.import_module, PUBLIC):
        for name in set(package.__all__) - {"__version__"}:
            thing = getattr(package, name)
            assert thing.__doc__ and id(thing) in documented, f"no page of docs/api has {package.__name__}.{name}"
    kernels = {path.stem: set(re.findall(r"^def (\w+)", path.read_text(), re.MULTILINE)) for path in KERNELS}
    specified = kernels.pop("reference")
    for module, names in kernels.items():
        for name in names & specified:
            assert f"::: fastgrpo.kernels.{module}.{name}\n" in TEXTS[ROOT / "docs" / "api" / "kernels.md"]
