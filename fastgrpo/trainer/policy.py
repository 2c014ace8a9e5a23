"""Makes the policy of a run: plans its memory, loads it, adds adapters, and shards it over the ranks if so chosen.

All ranks begin with the same weights. On a CPU the process keeps the memory that its steps free.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.policy.load import policy_and_tokenizer
from fastgrpo.policy.lora import base_weights, refuse_adapters, taken_over, wrap_lora
from fastgrpo.policy.model import Policy
from fastgrpo.policy.shard import check_torch, shard
from fastgrpo.ranks import Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.run.kept_memory import keep_freed_memory
from fastgrpo.run.resume import digest_of_weights, refuse_differences
from fastgrpo.trainer.memory import Plan, choose_parallel, plan_run

if TYPE_CHECKING:  # an extra
    from peft import PeftModel


@dataclass(frozen=True)
class Made:
    """The policy of a run and what belongs to it.

    Attributes:
        policy: The policy.
        tokenizer: Its tokenizer.
        plan: The plan of the run's memory, or None where there can be none.
        digest: The digest of the weights before any adapters, where a resumed run needs the very same; else None.
        parallel: How the ranks share the run, ddp or fsdp2.
        why: Why, as a text for people.
        wrapper: Peft's view of the model, where it has adapters; else None.
    """

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    plan: Plan | None
    digest: str | None
    parallel: str
    why: str
    wrapper: "PeftModel | None"


def make_policy(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: TrainingConfig,
    ranks: Ranks,
    wrapper: "PeftModel | None" = None,
    rewards: Rewards | None = None,
) -> Made:
    """Make the policy of a run."""
    if args.parallel == "fsdp2" and ranks.group is None:
        raise ValueError(
            "parallel=fsdp2 shards a run over several processes, and this is one alone; start it by torchrun "
            "--nproc_per_node N -m fastgrpo.train ..., or leave parallel out"
        )
    plan = plan_run(args, model, ranks=ranks, rewards=rewards)
    if plan:
        plan.check()
    parallel, why = (plan.parallel, plan.chosen) if plan else choose_parallel(args, None)
    if parallel == "fsdp2":
        check_torch()
    checkpointing = plan.checkpointing if plan else args.gradient_checkpointing is not False
    chosen = dataclasses.replace(args, gradient_checkpointing=checkpointing)  # auto has become one of the two
    policy, tokenizer = policy_and_tokenizer(model, tokenizer, chosen)
    if policy.device.type == "cpu":
        keep_freed_memory()
    if isinstance(model, PreTrainedModel):
        ranks.share([*policy.parameters(), *policy.module.buffers()], "the weights of the model")
    # A resumed run makes the frozen reference, or the weights below the adapters, from the model that it is given.
    needed = args.keeps_first_weights or ranks.size > 1
    digest = digest_of_weights(base_weights(policy.module)) if needed else None
    refuse_differences(ranks, weights_of_the_model=digest)
    refuse_adapters(policy.module)
    if wrapper is not None:
        taken_over(wrapper)
    elif args.use_peft:
        wrapper = wrap_lora(
            policy.module,
            r=args.lora_r,
            alpha=args.lora_alpha,
            target_modules=args.lora_target_modules,
            seed=args.seed,
        )
    if parallel == "fsdp2":
        policy = shard(
            policy,
            ranks,
            dtype=policy.dtype,
            reshard_after_forward=args.fsdp_reshard_after_forward,
            cpu_offload=args.fsdp_cpu_offload,
        )
    return Made(policy, tokenizer, plan, digest if args.keeps_first_weights else None, parallel, why, wrapper)
