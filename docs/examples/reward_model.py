"""Trains a reward model on preference pairs with TRL's RewardTrainer.

    python docs/examples/reward_model.py MODEL PAIRS FOLDER

PAIRS is a JSON Lines file with the columns prompt, chosen and rejected. The last fifth is held out.
"""

import sys

from datasets import load_dataset
from trl import RewardConfig, RewardTrainer


def main(model, pairs, folder):
    rows = load_dataset("json", data_files=pairs, split="train").train_test_split(test_size=0.2, shuffle=False)
    args = RewardConfig(
        folder,
        learning_rate=1e-3,  # for 0.2M parameters; about 1e-5 for a pretrained model
        num_train_epochs=4,
        per_device_train_batch_size=16,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = RewardTrainer(model, args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train()
    print(f"accuracy on held-out pairs: {trainer.evaluate()['eval_accuracy']:.3f}")
    trainer.save_model()  # with the tokenizer


if __name__ == "__main__":
    main(*sys.argv[1:])
