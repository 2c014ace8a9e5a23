"""What a caller says about the tokens: each input that would give a wrong loss is refused by its name."""

import math
from dataclasses import replace

import oracle
import pytest
import torch

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels.objectives import PolicyRows
from fastgrpo.loss.inputs import check_kept, check_temperature, check_tensor, check_values
from fastgrpo.loss.objective import Interval

NAN, INF, V = math.nan, math.inf, 40


def per_token(**at):
    """Six ones; `at2=x` puts x at index 2."""
    values = torch.ones(6)
    for name, value in at.items():
        values[int(name[2:])] = value
    return values


# (arguments, the message). All three losses refuse them, but for `temperature` in grpo_loss, which takes none.
REFUSED = {
    "rows-mask": ({"rows": per_token() > 0}, r"rows must be indices, got a mask of bools; pass mask.flatten\(\)"),
    "rows-floats": ({"rows": torch.tensor([0.0, 1.0])}, "rows must be integers, got torch.float32"),
    "rows-list": ({"rows": [0, 1]}, "rows must be a tensor, got list"),
    "rows-2d": ({"rows": torch.tensor([[0, 1]])}, r"rows must be \[M\], got shape \(1, 2\)"),
    "rows-twice": ({"rows": torch.tensor([0, 2, 2])}, r"rows must rise strictly within \[0, 6\), got 2 at index 2"),
    "rows-unsorted": ({"rows": torch.tensor([0, 3, 2])}, r"rows must rise strictly within \[0, 6\), got 2 at index 2"),
    "rows-negative": ({"rows": torch.tensor([-1, 3])}, r"rows must rise strictly within \[0, 6\), got -1 at index 0"),
    "rows-beyond": ({"rows": torch.tensor([3, 6])}, r"rows must rise strictly within \[0, 6\), got 6 at index 1"),
    "rows-all-but-wrong": ({"rows": torch.tensor([5, 4, 3, 2, 1, 0])}, "rows must rise strictly"),
    "rows-elsewhere": ({"rows": torch.zeros(2, dtype=torch.long, device="meta")}, "rows must be on cpu"),
    "temperature-0": ({"temperature": 0.0}, "temperature must be at least 1e-30, got 0.0"),
    "temperature-negative": ({"temperature": -1}, "temperature must be at least 1e-30, got -1"),
    "temperature-nan": ({"temperature": NAN}, "temperature must be finite, got nan"),
    "temperature-inf": ({"temperature": INF}, "temperature must be finite, got inf"),
    "temperature-subnormal": ({"temperature": 1e-40}, "temperature must be at least 1e-30, got 1e-40"),
    "temperature-text": ({"temperature": "1"}, "temperature must be a number, got '1'"),
    "temperature-none": ({"temperature": None}, "temperature must be a number, got None"),
    "temperatures-0": ({"temperature": per_token(at2=0.0)}, "temperature must be finite .* got 0.0 at index 2"),
    "temperatures-negative": ({"temperature": per_token(at5=-1)}, "temperature must be .* got -1.0 at index 5"),
    "temperatures-nan": ({"temperature": per_token(at2=NAN)}, "temperature must be finite and .* got nan at index 2"),
    "temperatures-grad": ({"temperature": per_token().requires_grad_()}, "temperature must not require grad"),
    "mask-nan": ({"mask": per_token(at1=NAN)}, "mask must be 0, or positive where a token counts, got nan at index 1"),
    "mask-negative": ({"mask": per_token(at1=-1)}, "mask must be 0, or positive .* got -1.0 at index 1"),
    "mask-complex": ({"mask": per_token() * 1j}, "mask must be real numbers, got torch.complex64"),
    "mask-grad": ({"mask": per_token().requires_grad_()}, "mask must not require grad"),
    "advantages-nan": ({"advantages": per_token(at4=NAN)}, "advantages must be finite .* got nan at index 4"),
    "advantages-inf": ({"advantages": per_token(at0=INF)}, "advantages must be finite .* got inf at index 0"),
    "advantages-complex": ({"advantages": per_token() * 1j}, "advantages must be real numbers, got torch.complex64"),
    "advantages-list": ({"advantages": [1.0] * 6}, "advantages must be a tensor, got list"),
    "sampler-inf": ({"sampler_logps": per_token(at3=INF)}, "sampler_logps must be finite, or .* got inf at index 3"),
    "weights-nan": ({"token_weights": per_token(at3=NAN)}, "token_weights must be finite .* got nan at index 3"),
    "weights-grad": ({"token_weights": per_token().requires_grad_()}, "token_weights must not require grad"),
    "items-negative": ({"num_items_in_batch": -1}, "num_items_in_batch must be at least 0, got -1"),
    "items-nan": ({"num_items_in_batch": NAN}, "num_items_in_batch must be finite, got nan"),
    "items-text": ({"num_items_in_batch": "9"}, "num_items_in_batch must be a number, got '9'"),
    "items-tensor": ({"num_items_in_batch": torch.tensor(-2)}, "num_items_in_batch must be finite and .* got -2"),
    "items-many": ({"num_items_in_batch": torch.ones(2)}, r"num_items_in_batch must be one number, got shape \(2,\)"),
    "cu_seqlens-floats": ({"cu_seqlens": torch.tensor([0, 2.5, 6])}, "cu_seqlens must be integers, got torch.float32"),
    "cu_seqlens-empty": ({"cu_seqlens": torch.zeros(0, dtype=torch.long)}, r"cu_seqlens must be \[S\+1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["old_logps", "ref_logps"])
def test_log_probs_of_models_that_are_nan_make_the_loss_nan(name):
    """A trainer skips such an update, and may go on."""
    logps = torch.full((6,), -1.0, requires_grad=True)
    given = {"old_logps": -per_token(), "ref_logps": -per_token(), name: per_token(at3=NAN)}
    out = grpo_loss(logps, advantages=per_token(), cu_seqlens=[0, 2, 6], beta=0.1, **given)
    assert out.loss.isnan()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    change, message = REFUSED[name]
    given = {"cu_seqlens": [0, 2, 6], "old_logps": -per_token(), "advantages": per_token(), **change}
    hidden, weight, targets = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    with pytest.raises(ValueError, match=f"^{message}"):
        linear_grpo_loss(hidden, weight, targets, **given)
    with pytest.raises(ValueError, match=f"^{message}"):
        logits_grpo_loss(hidden @ weight.T, targets, **given)
    if "temperature" in change:
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_logprob(hidden, weight, targets, **change)
    else:
        with pytest.raises(ValueError, match=f"^{message}"):
            grpo_loss(-per_token(), **given)


def test_weights_of_a_bonus_without_its_coefficient_are_refused():
    """Nothing would read them, and who passes them has forgotten entropy_coef."""
    hidden, weight, given = torch.randn(6, 4), torch.randn(9, 4), {"entropy_weights": per_token() / 6}
    arguments = (hidden, weight, torch.arange(6), per_token())
    with pytest.raises(ValueError, match=r"entropy_weights needs an entropy_coef other than 0, got entropy_coef=0\.0"):
        linear_grpo_loss(*arguments, **given)
    plain = linear_grpo_loss(*arguments, entropy_coef=0.1)
    assert torch.equal(linear_grpo_loss(*arguments, **given, entropy_coef=0.1).loss, plain.loss)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_of_any_integers(dtype, level):
    case = oracle.make_case()
    knobs = {"importance_sampling_level": level, "loss_type": "grpo"}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    rows = case.mask.flatten().nonzero().squeeze(1)
    output, actual = oracle.run(case, linear_grpo_loss, rows=rows.to(dtype), **knobs)
    assert torch.equal(output.loss, expected.loss)
    assert all(torch.equal(actual[name], gradients[name]) for name in gradients)


def test_no_rows_are_legal():
    case = oracle.make_case()
    output, gradients = oracle.run(case, linear_grpo_loss, rows=torch.zeros(0, dtype=torch.long))
    assert output.loss.item() == 0 and not output.active.any() and (gradients["weight"] == 0).all()


def test_a_refusal_names_the_token_and_not_the_kept_row():
    case = oracle.make_case(masked=0.0)
    mask = torch.arange(16) >= 9
    bad = case.advantages.index_fill(0, torch.tensor([11]), NAN)
    with pytest.raises(ValueError, match="got nan at index 11"):
        oracle.run(replace(case, mask=mask, advantages=bad), linear_grpo_loss)


def test_what_the_loss_does_not_read_is_not_refused():
    """Numbers outside of the mask, the reference at beta = 0, a reward's sampler that reported nothing."""
    case = oracle.make_case(masked=0.3)
    expected, _ = oracle.run(case, linear_grpo_loss)
    old = case.old_logps.masked_fill(~case.mask, NAN)
    output, _ = oracle.run(replace(case, old_logps=old, ref_logps=[NAN]), linear_grpo_loss)
    assert torch.equal(output.loss, expected.loss)
    unknown = oracle.run(case, linear_grpo_loss, sampler_logps=torch.full((16,), NAN))[0]
    torch.testing.assert_close(unknown.loss, expected.loss)


# knobs that look at whole sequences
COUPLED = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "sequence-sampler": {"sampler_logps": -per_token()},
}


def loss_of_rows(rows, **knobs):
    """The third of six tokens is masked out; the sequences have three tokens each."""
    given = {"mask": torch.arange(6) != 2, "cu_seqlens": [0, 3, 6], "old_logps": -per_token()}
    rows = torch.tensor(rows, dtype=torch.long)
    return grpo_loss(-per_token(at4=0.5), advantages=per_token(), rows=rows, **given, **knobs).loss


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize(("rows", "at"), [([0, 3, 4, 5], "True at index 1"), ([0, 1, 2, 3, 4, 5], "False at index 2")])
def test_rows_hold_whole_sequences_where_the_objective_looks_at_them(name, rows, at):
    """A part of a sequence would be taken for the whole, and its ratio would be another one without a word."""
    with pytest.raises(ValueError, match=f"^mask must select the tokens in rows, and no others, .* got {at}"):
        loss_of_rows(rows, **COUPLED[name])
    assert loss_of_rows(rows).isfinite()  # where each token counts by itself, any rows are legal
    for whole in ([0, 1, 3, 4, 5], [3, 4, 5], []):
        assert loss_of_rows(whole, **COUPLED[name]).isfinite()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_count_may_be_a_tensor_of_any_shape_with_one_number(shape):
    """transformers' Trainer makes it one-dimensional for several GPUs."""
    case = oracle.make_case()
    knobs = {"entropy_coef": 0.1, "num_items_in_batch": 7}
    expected, gradients = oracle.run(case, linear_grpo_loss, **knobs)
    output, actual = oracle.run(case, linear_grpo_loss, **{**knobs, "num_items_in_batch": torch.full(shape, 7)})
    assert torch.equal(output.loss, expected.loss) and output.loss.shape == ()
    assert all(torch.equal(actual[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
def test_a_step_without_tokens_counts_as_one(count):
    case = oracle.make_case()
    expected, _ = oracle.run(case, linear_grpo_loss, num_items_in_batch=1)
    assert torch.equal(oracle.run(case, linear_grpo_loss, num_items_in_batch=count)[0].loss, expected.loss)


def test_advantages_of_integers():
    case = oracle.make_case(dtype=torch.float32)
    whole = torch.arange(16) - 8
    expected, _ = oracle.run(replace(case, advantages=whole.float()), linear_grpo_loss)
    assert torch.equal(oracle.run(replace(case, advantages=whole), linear_grpo_loss)[0].loss, expected.loss)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ([1.0], "real numbers", "x must be a tensor, got list"),
        (None, "real numbers", "x must be a tensor, got NoneType"),
        (torch.ones(2), "integers", "x must be integers, got torch.float32"),
        (torch.ones(2).bool(), "integers", "x must be integers, got torch.bool"),
        (torch.ones(2) * 1j, "real numbers", "x must be real numbers, got torch.complex64"),
        (torch.ones(2) * 1j, "floating point", "x must be floating point, got torch.complex64"),
        (torch.ones(2, device="meta"), "real numbers", "x must be on cpu like y, got meta"),
    ],
)
def test_tensors_of_the_wrong_kind_or_device(value, kind, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_tensor(value, "x", kind, torch.ones(1), "y")


def test_the_first_broken_number_is_named_with_its_index():
    numbers = torch.tensor([[1.0, 2.0], [-3.0, math.nan]])
    with pytest.raises(ValueError, match=r"^x must be at least 0, got -3\.0 at index 2$"):
        check_values(numbers, "x", "be at least 0", lambda x: x >= 0)
    with pytest.raises(ValueError, match=r"got -3\.0 at index 7$"):
        check_values(numbers, "x", "be at least 0", lambda x: x >= 0, torch.tensor([[1, 5], [7, 9]]))
    check_values(numbers[:1], "x", "be at least 0", lambda x: x >= 0)


def kept_of(targets):
    return PolicyRows(None, targets, *[None] * 6)


def test_values_on_a_gpu_are_asserted_only_in_anomaly_mode(monkeypatch):
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asserted.append((condition.shape, message)))
    kept = kept_of(torch.zeros(12, dtype=torch.long, device="meta"))
    check_kept(kept, V)
    assert asserted == []
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        check_kept(kept, V)
    assert asserted == [(torch.Size([]), f"targets must be in [0, {V}) on active rows")]


def test_what_anomaly_mode_asserts(monkeypatch):
    monkeypatch.setattr("fastgrpo.loss.inputs._on_host", lambda values: False)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        check_values(torch.ones(3), "x", "be finite", torch.isfinite)
        with pytest.raises(RuntimeError, match="x must be finite"):
            check_values(torch.tensor([0.0, math.inf]), "x", "be finite", torch.isfinite)


@pytest.mark.parametrize("bad", [V, -1, -100])
def test_targets_outside_of_the_vocabulary(bad):
    check_kept(kept_of(torch.tensor([0, V - 1])), V)
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {V}\) on active rows, got {bad} at index 1"):
        check_kept(kept_of(torch.tensor([0, bad])), V)


def test_a_compiled_graph_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_values(torch.tensor([math.nan]), "x", "be finite", torch.isfinite)
    Interval().check("x", math.nan)


@pytest.mark.parametrize("temperature", [1e-30, 0.7, 1e30])
def test_logits_of_ordinary_size_stay_finite_at_every_legal_temperature(temperature):
    """The lower bound is made for it: at 1e-31 logits of 1e8 are infinite in fp32."""
    check_temperature(temperature, torch.ones(1))
    check_kept(kept_of(torch.ones(1))._replace(temperature=torch.tensor([temperature])))
    assert (torch.tensor([1e8, -1e8]) / temperature).isfinite().all()
    assert (torch.tensor(1e8) / 1e-31).isinf()
