"""TRL's further arguments of a trainer: what is refused, and with which remedy."""

import pytest
import tiny

from fastgrpo import GRPOConfig
from fastgrpo.trainer.setup import NOT_YET, advice, refuse_given, refuse_images, with_adapters


def test_what_does_not_exist_here_is_named():
    refuse_given((None, None), tools=None, rollout_func=[])
    for name in NOT_YET:
        with pytest.raises(ValueError, match=f"{name} is not in fastgrpo yet: leave it out, and"):
            refuse_given(None, **{name: print})
    with pytest.raises(ValueError, match=r"optimizers: .* set learning_rate, weight_decay"):
        refuse_given((object(), None))


def test_images_are_refused():
    refuse_images([{"prompt": "a", "picture": 1}])
    refuse_images([])
    for column in ("image", "images"):
        with pytest.raises(ValueError, match=f"the rows have the column '{column}': models for images are not trained"):
            refuse_images([{"prompt": "a", column: None}])


@pytest.mark.parametrize(
    "loss, level, told",
    [("dapo", "sequence", True), ("bnpo", "sequence", True), ("dr_grpo", "sequence", True), ("cispo", "sequence", True),
     ("grpo", "sequence", False), ("dapo", "token", False), ("luspo", "sequence", False), ("vespo", "token", False)],
)  # fmt: skip
def test_settings_that_do_not_go_together(loss, level, told):
    cap = {"epsilon_high": 5.0} if loss == "cispo" else {}
    warnings = advice(GRPOConfig(loss_type=loss, importance_sampling_level=level, **cap))
    assert [("adds up over tokens" in text, "loss_type=grpo is GSPO's" in text) for text in warnings] == (
        [(True, True)] if told else []
    )


def test_adapters_come_from_one_place():
    peft = pytest.importorskip("peft")
    config, args = peft.LoraConfig(r=4, target_modules=["q_proj"]), GRPOConfig()
    assert with_adapters("model", None, args) == ("model", args, None)
    model, changed, wrapper = with_adapters("model", config, args)
    assert (model, wrapper, changed.use_peft, changed.lora_r) == ("model", None, True, 4)
    with pytest.raises(ValueError, match=r"both ask for adapters"):
        with_adapters("model", config, GRPOConfig(use_peft=True))
    wrapped = peft.get_peft_model(tiny.model(), config)
    model, changed, wrapper = with_adapters(wrapped, None, args)
    assert model is wrapped.get_base_model() and wrapper is wrapped and changed.lora_target_modules == ("q_proj",)
    with pytest.raises(ValueError, match=r"and there is a peft_config too"):
        with_adapters(wrapped, config, args)
