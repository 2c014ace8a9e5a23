"""README, CONTRIBUTING and docs/: links, files, flags and commands exist, Python runs, figures are the code's."""

import dataclasses
import re
import shlex

import pytest
import tiny
import torch
from paths import ROOT
from torch.distributed.run import get_args_parser
from transformers import Qwen2Config, Qwen2ForCausalLM

import fastgrpo
from benchmarks import report
from fastgrpo import chat, distill, doctor, evaluate, sft
from fastgrpo import report as report_command
from fastgrpo.config.settings import TrainConfig
from fastgrpo.run.metrics import METRICS
from fastgrpo.run.sweep import FLAGS

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
RECIPE_PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def blocks(page, language="python"):
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def anchors(page):
    """The headings of a page, as GitHub's links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page, name):
    """The arguments of each `python -m fastgrpo.NAME ...` in the code blocks of a page."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    found = [line.partition(f"python -m fastgrpo.{name}") for line in lines]
    return [shlex.split(rest, comments=True) for before, command, rest in found if command and not before]


@every_page
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@every_page
def test_files_that_are_named_exist(page):
    """Capitals in a name stand for something else: TASK, MODULE."""
    named = re.findall(r"`((?:fastgrpo|kernels|tests|benchmarks|docs)/[\w/.-]+)`", page.read_text())
    for name in named:
        if not re.search(r"[A-Z]{3}", name):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_a_page_is_at_most_250_lines(page):
    """The page of settings is made from the code, to be searched and not to be read."""
    assert page.read_text().count("\n") <= 250 or page.name == "settings.md"


@pytest.mark.parametrize("page", RECIPE_PAGES, ids=lambda path: path.name)
def test_a_recipe_is_told_in_300_words(page):
    text = re.sub(r"```.*?```|!?\[[^\]]*\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 300
    assert page.stem in (ROOT / "docs" / "recipes.md").read_text()


OTHERS = [evaluate, chat, sft, distill, report_command]


def flags_of(command, capsys):
    """Every flag that --help of a command names, short ones too."""
    with pytest.raises(SystemExit):
        command.main(["--help"])
    return set(re.findall(r"(?<![\w-])--?\w+", capsys.readouterr().out))


def test_flags_in_the_text_exist(capsys):
    """In code spans that begin with a flag."""
    known = {f"--{field.name}" for field in dataclasses.fields(TrainConfig)}
    known = known.union(*(flags_of(command, capsys) for command in OTHERS)) | {
        "--config",
        "--debug",
        "--model",
        "--check",
        *FLAGS,
        *get_args_parser()._option_string_actions,  # of torchrun
    }
    for page in PAGES:
        for span in re.findall(r"`(--[^`\n]+)`", page.read_text()):
            assert set(re.findall(r"--\w+", span)) <= known, (page.name, span)


def run_small(block, path, replacements):
    """Execute a block with a tiny model in the place of a real one. Returns its names."""
    for theirs, ours in {"Qwen/Qwen2.5-0.5B": str(tiny.save(path / "m")), **replacements}.items():
        assert theirs in block, theirs
        block = block.replace(theirs, ours)
    names = {}
    exec(block, names)
    return names


def test_the_run_from_python(tmp_path, monkeypatch, without_curves):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(ROOT / "docs" / "training.md")
    short = {"max_steps=100": "max_steps=2, logging_steps=1", "num_generations=8": "num_generations=4"}
    names = run_small(block, tmp_path, short | {"beta=0.04": "beta=0.04, max_completion_length=5"})
    assert names["summary"]["steps"] == 2
    folder = tmp_path / "runs" / "ten-words"
    assert '"words"' in (folder / "metrics.jsonl").read_text()
    assert '"words"' in (folder / "samples.jsonl").read_text()


def test_the_engine_alone(tmp_path, capsys):
    (block,) = blocks(ROOT / "docs" / "rollouts.md")
    run_small(block, tmp_path, {"max_tokens=64": "max_tokens=3"})
    drawn = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if re.match(r"[01] (stop|length)", line)]
    assert [number for number, _ in drawn].count("0") == [number for number, _ in drawn].count("1") == 4


def test_metrics_that_are_named_exist():
    text = (ROOT / "docs" / "runs.md").read_text().split("## Metrics")[1].split("## Checkpoints")[0]
    named = set(re.findall(r"`([a-z_]+(?:/[\w{}]+)*)`", re.sub(r"`[^`]*(?:\.|--)[^`]*`", "", text)))
    assert len(named) > 15 and named <= set(METRICS), named - set(METRICS)


def test_what_is_not_measured_is_said_twice():
    """Once in the README and once on the page about benchmarks; other pages are about what there is."""
    for page in PAGES:
        said = " ".join(page.read_text().split()).lower().count("not yet measured on a gpu")
        assert said == (page.name in ("README.md", "benchmarks.md")), page.name


def test_the_tables_of_benchmarks_are_those_of_the_results():
    for path in report.RESULTS.glob("*.jsonl"):
        found = report.newest(path)
        tables = {f"{benchmark}-{path.stem}": report.table(rows, path.stem) for benchmark, rows in found.items()}
        for name, table in {**tables, f"summary-{path.stem}": report.summary(found)}.items():
            pages = [page.read_text() for page in report.PAGES if f"<!-- bench:{name} -->" in page.read_text()]
            assert len(pages) == 1 and report.fill(pages[0], name, table) == pages[0], f"{name} is stale"


def test_the_figures_of_the_readme_are_those_of_the_results():
    found = report.newest(report.RESULTS / "cpu.jsonl")
    step, loss = (
        [row for row in rows if row["case"] == rows[0]["case"]]
        for rows in (found["pretrained"], found["linear_grpo_loss"])
    )
    (mine, trl), (my_loss, trl_loss) = (
        ({r["variant"]: r for r in rows}[name] for name in ("fastgrpo", "trl")) for rows in (step, loss)
    )
    figures = (
        f"**{trl['ms_p50'] / mine['ms_p50']:.2f} times** as fast",
        f"**{mine['peak_mib'] / trl['peak_mib']:.2f} times** the memory",
        f"**{my_loss['peak_mib']:.0f} MiB**", f"{trl_loss['peak_mib']:,.0f} MiB",
        f"{trl_loss['ms_p50'] / my_loss['ms_p50']:.2f} times as fast", f"TRL {trl['trl'].rpartition('.')[0]}",
    )  # fmt: skip
    assert all(figure in (ROOT / "README.md").read_text() for figure in figures), figures


def planned(model, flags, capsys):
    """Part -> size, as doctor prints them."""
    command = next(argv for argv in commands(ROOT / "docs" / "memory.md", "doctor"))
    argv = [str(model) if word == "MODEL" else word for word in command] + shlex.split(flags)
    assert doctor.main(argv) == 0
    lines = capsys.readouterr().out.partition("memory of ")[2].splitlines()[1:]
    sizes = (re.match(r" +(.+?) +([\d.]+ [KMG]iB)", line) for line in lines)
    return dict(size.groups() for size in sizes if size)


def test_the_memory_tables_are_what_doctor_prints(tmp_path, capsys):
    """Of the shape of Qwen2.5-0.5B, under each of the settings."""
    Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    _, parts, settings, *_ = re.split(r"\n(?=\|.*\|\n\|---)", (ROOT / "docs" / "memory.md").read_text())
    cells = [re.findall(r"[^|]+", row) for row in parts.split("\n\n")[0].splitlines()[2:]]
    plain = planned(tmp_path, "", capsys)
    assert len(cells) == 12 and all(plain[part.strip()] == size.strip() for part, size, _ in cells)
    for row in settings.split("\n\n")[0].splitlines()[2:]:
        flags, reference, in_all = (cell.strip(" `") for cell in row.strip("|").split("|"))
        found = planned(tmp_path, "" if flags == "as above" else flags, capsys)
        assert (found["reference"], found["in all"]) == (reference, in_all), flags


# docs/loss.md: before and after agree, and so do padded and packed.
S, LENGTH = 3, 7


@pytest.fixture
def names():
    """What the blocks expect to be there."""
    model = Qwen2ForCausalLM(tiny.config()).float()
    mask = torch.ones(S, LENGTH - 1)
    mask[0, 4:] = mask[2, :2] = 0
    return {
        "torch": torch,
        "fastgrpo": fastgrpo,
        "model": model,
        "reference": Qwen2ForCausalLM(tiny.config(hidden_size=48)).float(),
        "input_ids": torch.randint(model.config.vocab_size, (S, LENGTH)),
        "mask": mask,
        "old_logps": -4 - torch.rand(S, LENGTH - 1),
        "advantages": torch.randn(S),
    }


def run(block, names):
    """Gradients of every parameter after the block."""
    names["model"].zero_grad()
    exec(block, names)
    return {name: p.grad.clone() for name, p in names["model"].named_parameters()}


def test_five_lines_replace_head_and_loss(names):
    before, after, *_ = blocks(ROOT / "docs" / "loss.md")
    assert before.strip().count("\n") == after.strip().count("\n") == 4
    expected = run(before, names)
    torch.testing.assert_close(run(after, names), expected)
    torch.testing.assert_close(names["out"].loss, names["loss"])
    assert names["out"].loss != 0


def test_the_kl_of_the_full_distributions_is_that_of_torch(names):
    block = blocks(ROOT / "docs" / "loss.md")[2]
    names["hidden"] = names["model"].model(names["input_ids"]).last_hidden_state[:, :-1]
    gradients = run(f"{block}out.loss.backward()", names)
    assert any(gradient.any() for gradient in gradients.values())
    ours, theirs = (
        torch.distributions.Categorical(logits=names[name](names["input_ids"]).logits[:, :-1])
        for name in ("model", "reference")
    )
    kl = torch.distributions.kl_divergence(ours, theirs)[names["mask"] == 1].mean()
    torch.testing.assert_close(names["out"].metrics["kl"], kl)


def test_packed_equals_padded(names):
    _, after, _, packed = blocks(ROOT / "docs" / "loss.md")
    expected = run(after, names)
    padded = names["out"]
    hidden = names["model"].model(names["input_ids"]).last_hidden_state
    at_the_end = torch.zeros(S, 1)
    names |= {
        "packed_hidden": hidden.flatten(0, 1),
        "packed_ids": names["input_ids"].flatten(),
        "packed_mask": torch.cat([names["mask"], at_the_end], 1).flatten(),
        "packed_old_logps": torch.cat([names["old_logps"], at_the_end], 1).flatten(),
        "cu_seqlens": torch.arange(S + 1) * LENGTH,
    }
    torch.testing.assert_close(run(packed, names), expected)
    torch.testing.assert_close(names["out"].loss, padded.loss)
    torch.testing.assert_close(names["out"].logps.view(S, LENGTH)[:, :-1], padded.logps)
