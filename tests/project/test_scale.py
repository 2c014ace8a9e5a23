"""The predictions for several GPUs: by hand, and on their page."""

import re
import shlex

import pytest
from paths import ROOT
from torch.distributed.run import get_args_parser

from benchmarks import scale
from fastgrpo import evaluate, train
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.trainer.memory import Count

PAGE = (ROOT / "docs" / "scale.md").read_text()


@pytest.fixture(scope="module")
def rows():
    return {row[:3]: row for row in scale.rows(scale.assumptions([]))}


def test_the_page_shows_the_predictions():
    shown = PAGE.partition("<!-- scale -->\n")[2].partition("<!-- /scale -->")[0]
    assert shown == scale.table() + "\n", "python -m benchmarks.scale prints the table for docs/scale.md"
    assert f"about {round(scale.balance(scale.assumptions([])), -2):.0f} lanes" in PAGE


def test_what_a_rank_sends():
    """Of 1,000 parameters, 200 of them in embedding and head, and 4 ranks: three quarters of what they send in all."""
    count = Count(base=1000, adapters=0, trained=1000, layers=[400, 400])
    assert scale.sent(count, 4, 5, sharded=False) == 2 * 0.75 * 4000  # whatever the number of micro-batches
    assert scale.sent(count, 4, 5, sharded=True) == 0.75 * (5 * (1600 + 1600 + 400 + 4000) + 2000)
    assert scale.sent(count, 4, 5, sharded=True, reshard=False) == 0.75 * (5 * (1600 + 400 + 4000) + 2000)


def test_7b_on_8_gpus_by_hand(rows):
    """34,816 tokens a GPU in 3 micro-batches; 512 decode steps that read 15.2 GB each."""
    row, parameters, root = rows["7B", 8, "fsdp2"], 7_615_616_512, 1_089_998_336
    assert row.sent == pytest.approx(7 / 8 * (3 * (8 * parameters - 2 * root) + 2 * parameters))
    tokens = 8 * (256 + 8 * 512)
    assert row.compute == pytest.approx(8 * parameters * tokens / 395.6e12 + 512 * 2 * parameters / 2.01e12)


def test_modes_that_do_not_fit_are_left_out(rows):
    modes = {name: {key[2] for key in rows if key[0] == name} for name in scale.MODELS}
    assert modes["1.5B"] == {"ddp", "fsdp2", "fsdp2, kept whole"} and "ddp" not in modes["7B"]
    assert ("32B", 8, "fsdp2") not in rows and {("32B", 8, scale.OFFLOADED), ("32B", 64, "fsdp2")} <= rows.keys()


def test_bandwidths_are_arguments(capsys):
    scale.main(["--network", "25", "--room", "60"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1.5B | 8 | ddp |"))
    assert line.split("|")[-3].strip() == f"{7 / 8 * 8 * 1_543_714_304 / 25e9:.2f}"


def launched(name):
    """The commands of the page that a launcher starts: its own arguments, and those of `python -m fastgrpo.NAME`."""
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(rf"\b(torchrun|accelerate launch) (.*) -m fastgrpo\.{name} (.*)", line)
            if found:
                yield found[1], shlex.split(found[2]), shlex.split(found[3])


def as_training(argv):
    return train.parse(["--model_name_or_path" if word == "--model" else word for word in argv])


def test_launchers_take_their_arguments_and_training_takes_the_rest():
    """Those of doctor are of training too, with another name for the model."""
    commands = [*launched("train"), *launched("doctor")]
    assert [name for name, *_ in commands] == ["torchrun", "accelerate launch", "torchrun", "torchrun", "torchrun"]
    for name, own, rest in commands:
        if name == "torchrun":
            given = get_args_parser().parse_args([*own, "script"])
            assert int(given.nproc_per_node) == 8 and (given.rdzv_backend == "c10d") == ("--nnodes" in own)
        as_training(rest)
    ((_, own, rest),) = launched("evaluate")
    assert get_args_parser().parse_args([*own, "script"]).nproc_per_node == "8"
    assert evaluate.parse(rest).output == "answers.jsonl"


def test_doctor_plans_the_run_that_the_page_starts():
    """Of a model whose config the page downloads first, as doctor downloads nothing."""
    (first, *_), ((_, own, planned),) = launched("train"), launched("doctor")
    assert as_training(planned) == as_training(first[2]) and own == first[1]
    assert f"\nhf download {as_training(planned).model_name_or_path} config.json\ntorchrun" in PAGE


def test_the_page_tells_the_work_of_one_gpu():
    """As the settings are: in the file for Slurm, and in the run behind the table."""
    *_, (_, _, slurm) = launched("train")
    config = as_training(slurm)
    counts = config.prompts_per_step, config.num_generations
    assert "{} x {} / 64 = {:.0f} completions".format(*counts, counts[0] * counts[1] / 64) in PAGE
    told = " ".join(PAGE.split())
    one, length = GRPOConfig(), f"completions of {GRPOConfig().max_completion_length}, in 3 micro-batches"
    assert f"{one.prompts_per_step} prompts of 256 tokens with {one.num_generations} {length}" in told
    assert config.model_name_or_path in re.search(r"hf download .* --local-dir (\S+)", PAGE)[1]
