"""The engine on the CPU with the kernels that it has on a GPU: group_decode and sample under the interpreter."""

import pytest
import tiny
import torch
from drawing import PROMPTS, ids_of

from fastgrpo.kernels import decode, layer
from fastgrpo.kernels.sampling import sample as fused
from fastgrpo.loss import dispatch
from fastgrpo.policy.lora import add_lora
from fastgrpo.rollout import engine as engine_module
from fastgrpo.rollout import sampling as sampling_module
from fastgrpo.rollout import weights as weights_module
from fastgrpo.rollout.attention import GroupDecode
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams, draws_differ

PROMPTS = PROMPTS[:3]


@pytest.mark.parametrize("planted", [False, True], ids=("right", "wrong"))
def test_the_first_use_of_group_decode_is_checked(planted, monkeypatch, caplog):
    """The planted error: the kernel does not see the last token of a prompt."""
    model, sampling = tiny.model("llama"), SamplingParams(temperature=0, max_tokens=2, stop_token_ids=(1,))
    expected = RolloutEngine(model, attention="products").generate(PROMPTS[::2], 2, sampling)
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setenv(dispatch.VARIABLE, "1")
    monkeypatch.setattr(engine_module, "make_provider", lambda *args: GroupDecode())
    monkeypatch.setattr(engine_module, "sample", fused)
    if planted:
        right = decode.group_decode
        monkeypatch.setattr(decode, "group_decode", lambda *args, **kw: right(*args[:-2], args[-2] - 1, args[-1], **kw))
    with caplog.at_level("WARNING", "fastgrpo"):
        seen = RolloutEngine(model, max_num_seqs=4).generate(PROMPTS[::2], 2, sampling)
    assert ids_of(seen) == ids_of(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours.logps, theirs.logps, atol=1e-5, rtol=0)
    assert set(dispatch._verdicts.values()) == {not planted}
    assert ["the kernel of group_decode failed" in x.getMessage() for x in caplog.records] == [True] * planted


@pytest.mark.parametrize("name, share, planted", [
    ("qwen3", None, 0), ("llama", 1.0, 0), ("qwen2", 0.0, 0), ("llama", None, 1.0),
], ids=["qwen3", "llama, merged adapters", "qwen2, adapters apart", "wrong"])  # fmt: skip
def test_fused_layers_draw_what_transformers_draws(name, share, planted, monkeypatch, caplog):
    """A decode step by the kernels alone, checked in its first use. The planted error: a large epsilon."""
    model, count = tiny.model(name), 3
    if share is not None:
        add_lora(model, r=2, alpha=4, target_modules=["q_proj", "up_proj", "down_proj"])
        monkeypatch.setattr(weights_module, "MERGED_SHARE", share)
    tiny.stir(model, "bias", "norm", "lora_B")
    how = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    prompt = PROMPTS[0]
    ids = model.generate(torch.tensor([prompt]), **how)
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setenv(dispatch.VARIABLE, "1")
    monkeypatch.setattr(engine_module, "make_provider", lambda *args: GroupDecode())
    monkeypatch.setattr(weights_module, "uses_kernels", lambda policy: True)
    calls, norm = [], layer.add_rms_norm

    def counted(hidden, added, weight, eps):
        calls.append(eps)
        return norm(hidden, added, weight, planted or eps)

    monkeypatch.setattr(layer, "add_rms_norm", counted)
    engine = RolloutEngine(model)
    for found in engine.generate([prompt], 2, SamplingParams(temperature=0, max_tokens=count)):
        assert found.ids == ids[0, len(prompt) :].tolist()
        logps = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = logps.gather(1, torch.tensor(found.ids)[:, None])[:, 0]
        torch.testing.assert_close(found.logps, exact, atol=1e-5, rtol=0)
    assert len(calls) == 5 * (1 if planted else 3)  # of two layers and the last norm; the check is one more step
    assert ["the kernel of decode layers failed" in x.getMessage() for x in caplog.records] == [True] * bool(planted)
    assert share is None or bool(engine.weights.copies) == (share > 0)


@pytest.mark.parametrize(
    "how", [pytest.param({"temperature": 0}, marks=pytest.mark.slow), {"temperature": 1.3, "top_p": 0.9}], ids=str
)
def test_the_kernels_of_a_draw_are_checked(how, monkeypatch):
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **how}
    logits, numbers = torch.randn(8, 70) * 2, torch.rand(8)
    assert draws_differ(logits, numbers, how) is None
    planted = [lambda logits, numbers, **how: fused(logits * 1.01, numbers, **how)]
    if how["temperature"]:
        planted.append(lambda logits, numbers, **how: fused(logits, (numbers + 0.1) % 1, **how))
    for wrong in planted:
        monkeypatch.setattr(sampling_module, "_fused", wrong)
        assert draws_differ(logits, numbers, how) is not None


@pytest.mark.slow
def test_a_flat_distribution_is_no_cause_for_alarm():
    """Where many tokens are equally likely, sums in fp32 put a random number into the interval of a neighbour."""
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    logits = torch.randn(8, 3000) * 0.1
    numbers = torch.softmax(logits.double(), -1).cumsum(-1)[:, 1500].float()  # on the boundary of two tokens
    assert draws_differ(logits, numbers, how) is None
