"""GRPO as a Lightning module, with `generate` of transformers and the loss of fastgrpo."""

import random
import sys

import lightning as L
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo import group_advantages, linear_grpo_loss, linear_logprob
from fastgrpo.tasks.arithmetic import carry_pairs, correctness, format_reward, to_row

GROUP, MU = 8, 2  # completions per prompt, updates per rollout
LOSS = {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


class GRPO(L.LightningModule):
    def __init__(self, name, learning_rate=2e-4, max_new_tokens=28):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        self.reference = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)]  # not in checkpoints
        self.tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def complete(self, rows, **sampling):
        prompts = self.tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True).to(self.device)
        ids = self.model.generate(**prompts, max_new_tokens=self.hparams.max_new_tokens, **sampling)
        completions = ids[:, prompts.input_ids.shape[1] :]
        stops = torch.isin(completions, torch.tensor(self.model.generation_config.eos_token_id, device=self.device))
        mask = stops.cumsum(1) - stops.long() == 0  # up to and including the first stop token
        attention = torch.cat([prompts.attention_mask, mask.long()], 1)
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
        texts = [self.tokenizer.decode(row[kept]) for row, kept in zip(completions, mask & ~stops, strict=True)]
        rewards = [correctness([], texts, [row["answer"] for row in rows]), format_reward([], texts)]
        return inputs, {"targets": completions, "mask": mask}, torch.tensor(rewards, device=self.device)

    def head(self, model, inputs, tokens):  # hidden states, shifted by one, and the weight of the head
        return model.base_model(**inputs)[0][:, -tokens["mask"].shape[1] - 1 : -1], model.get_output_embeddings().weight

    @torch.no_grad()
    def draw(self, rows):
        inputs, tokens, rewards = self.complete([row for row in rows for _ in range(GROUP)], **SAMPLING)
        for name, model in {"old_logps": self.model, "ref_logps": self.reference[0].to(self.device)}.items():
            tokens[name] = linear_logprob(*self.head(model, inputs, tokens), tokens["targets"])
        self.log("reward", rewards.sum(0).mean(), prog_bar=True)
        return inputs, tokens | {"advantages": group_advantages(rewards.sum(0), GROUP)}

    def training_step(self, rows, index):
        if index % MU == 0 or not hasattr(self, "tokens"):  # the same rows come MU times, with one rollout
            self.inputs, self.tokens = self.draw(rows)
        return linear_grpo_loss(*self.head(self.model, self.inputs, self.tokens), **self.tokens, **LOSS).loss

    def validation_step(self, rows, index):
        *_, (right, _) = self.complete(rows, do_sample=False)
        self.log("accuracy", right.mean(), batch_size=len(rows), prog_bar=True)

    def configure_optimizers(self):
        if self.trainer.accumulate_grad_batches * self.trainer.world_size != 1:
            raise ValueError(f"accumulate_grad_batches and devices must be 1: {MU} batches in a row share a rollout")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.hparams.learning_rate)
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": linear, "interval": "step"}]


def main(name, updates=200, prompts=16, seed=0, **options):
    L.seed_everything(seed)
    sums, held_out = [[to_row(*pair) for pair in pairs] for pairs in carry_pairs()]
    batches = [rows for _ in range(updates // MU) for rows in [random.sample(sums, prompts)] * MU]
    repeated, tests = (torch.utils.data.DataLoader(rows, batch_size=None) for rows in (batches, [held_out]))
    trainer = L.Trainer(max_steps=updates, val_check_interval=updates // 4, gradient_clip_val=1.0, devices=1, **options)
    module = GRPO(name)
    trainer.validate(module, tests)
    trainer.fit(module, repeated, tests)


if __name__ == "__main__":
    main(*sys.argv[1:])
