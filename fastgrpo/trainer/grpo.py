"""The training loop: collect -> update -> report, with evaluations and checkpoints between the steps.

    train: restore a checkpoint, then until the last step: evaluate, save, step
    step:  collect (rollout, rewards, advantages), update (pack, loss, optimizer), report (metrics, samples, warnings)

Supervised training (`supervised.py`) uses the same loop with its own collect and update.
"""

import dataclasses
import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

import fastgrpo.trainer.setup as setup
from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.data.prompts import with_system
from fastgrpo.data.records import Sample, Stateful, TrainerState
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.data.sources import Source, as_source
from fastgrpo.data.token_text import TokenText
from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.policy.fit import check_rows
from fastgrpo.policy.load import stop_token_ids
from fastgrpo.policy.ref_model import make_reference
from fastgrpo.ranks import join, together
from fastgrpo.rewards import find_rewards, prm_options
from fastgrpo.rewards.call import Rewards, rewards_settings
from fastgrpo.rewards.overlong import shaping
from fastgrpo.rollout import make_backend
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.checkpoint import Checkpointer
from fastgrpo.run.curves import PANELS, Panel, table
from fastgrpo.run.health import Watch
from fastgrpo.run.log import RunLog, open_log
from fastgrpo.run.metrics import Summary, evaluated
from fastgrpo.run.profiling import Profiler, StageTimer, peak_flops
from fastgrpo.run.resume import digest_of_rows, inputs_of, may_go_on, refuse_differences, set_aside, shared_settings
from fastgrpo.run.signals import StopSignals
from fastgrpo.run.snapshot import GlobalRNG, HostCopies, Snapshot, restore
from fastgrpo.run.terminal import is_terminal
from fastgrpo.tools import find_environments
from fastgrpo.tools.environments import Environments
from fastgrpo.tools.prompts import Prompts
from fastgrpo.trainer.callbacks import Arguments, Callbacks
from fastgrpo.trainer.collect import Collector, log_samples, rates, with_advantages
from fastgrpo.trainer.memory import MICRO_BATCHES
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.results import card_of, finish, log_metrics, push_to_hub, save_metrics, save_model, save_state
from fastgrpo.trainer.update import AdaptiveEntropy, GRPOUpdate, Learner

logger = logging.getLogger(__name__)
Reward = Callable | PreTrainedModel | str
# Methods that subclasses of TRL's trainer override, and that do not exist here.
HOOKS = {
    "compute_loss", "_compute_loss", "training_step", "prediction_step", "create_optimizer", "create_scheduler",
    "create_optimizer_and_scheduler", "get_train_dataloader", "get_eval_dataloader", "_get_train_sampler",
    "_prepare_inputs", "_calculate_rewards", "_generate", "_generate_single_turn", "_generate_and_score_completions",
    "_tokenize_prompts", "_get_per_token_logps_and_entropies", "get_off_policy_mask", "get_gamma_weights",
    "evaluation_loop", "log", "_save_checkpoint",
}  # fmt: skip


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let Python search for cyclic garbage less often: by default, it takes a tenth of a short step."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], 100_000) if thresholds[0] else 0, *thresholds[1:])  # 0 means never
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class GRPOTrainer:
    """Trains a causal LM by GRPO, under TRL's names.

    Args:
        model: A folder, hub id or GGUF file; or a transformers causal LM, which is trained in place; or peft's
            `PeftModel` of one, whose adapters are trained.
        reward_funcs: A reward or a list of them: a function `f(prompts, completions, **columns) -> list[float | None]`
            (see `Rewards`), a sequence classification model with one label, or a name: the folder or hub id
            (ORG/MODEL) of such a model, prm:NAME for a process reward model, or module:function.
        args: The settings, or None for the defaults.
        train_dataset: Rows with a `prompt` column (a list of dicts, a datasets.Dataset, a pandas.DataFrame), or a
            `Source` of them. Of an IterableDataset, only the rows that max_steps can need are read. `train` validates
            all rows before the first step. With environment_factory, the column and the rows may be left out; without
            rows, max_steps is needed.
        eval_dataset: Held-out rows, or a dict of them by name, validated like train_dataset; None for no evaluation. Of
            an IterableDataset, max_eval_samples rows are read.
        processing_class: The tokenizer, or None for the model's.
        reward_processing_classes: The tokenizers of reward models, one for each of reward_funcs. None, also as an
            entry, means the reward model's.
        callbacks: Callbacks of transformers, as instances or classes.
        optimizers: Not supported, like TRL's `quantization_config`.
        quantization_config: Not supported.
        peft_config: A `peft.LoraConfig`, instead of the settings use_peft, lora_r, lora_alpha and
            lora_target_modules.
        tools: Functions that the model may call while it generates, with type annotations and Google docstrings; plain
            or async.
        rollout_func: A function `f(prompts, trainer)` that generates the completions instead of the engine. It returns
            a dict with lists of `prompt_ids`, `completion_ids`, `logprobs` and optionally `env_mask`, which is 0 for
            tokens that the model did not draw. Reward functions get its other keys as columns.
        environment_factory: Makes the environment of a completion, see `fastgrpo.tools.environments.Environments`; or a
            dict of factories, and the column `environment` of a row names one.
        log: A `RunLog` that has already claimed its folder. None creates one from args.
        panels: Panels of the run's plot.

    Raises:
        ValueError: An argument or a setting is invalid. The message names it and the fix.
    """

    config_class: ClassVar[type[TrainingConfig]] = GRPOConfig
    title: ClassVar[str] = "GRPO"  # label of the progress bar
    # Metrics in the progress bar and in the line of a logged step: short name -> metric.
    shown: ClassVar = {"reward": "reward", "accuracy": "accuracy", "kl": "kl", "length": "completions/mean_length"}
    needed_rows: ClassVar[str] = "rows with a `prompt` column"
    unmeasured: ClassVar[str] = "no held-out rows, so accuracy is not measured; add a test.jsonl, or pass eval_dataset"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Source | Iterable[dict] | None = None,
        eval_dataset: Iterable[dict] | Mapping[str, Iterable[dict]] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        log: RunLog | None = None,
        panels: Sequence[Panel] = PANELS,
    ):
        setup.refuse_given(optimizers, quantization_config)
        model, args, wrapper = setup.with_adapters(
            model, peft_config, setup.checked(args, processing_class, self.config_class)
        )
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.ranks = ranks = join(args.device, args.ddp_timeout)
        self.rollout_func = rollout_func
        self.environment_pool = pool = self._make_environments(tools, environment_factory)
        if pool is not None and rollout_func is not None:
            raise ValueError(
                "rollout_func cannot be combined with tools or environments; call the tools in rollout_func, and mark "
                "their answers in env_mask"
            )
        if rollout_func is not None and args.oversampling_factor > 1:
            raise ValueError("oversampling_factor aborts groups, and rollout_func cannot be aborted; set it to 1")
        routed = pool is not None and pool.routed  # the rows name their environments
        writes = pool is not None and pool.resets and not routed
        if written := train_dataset is None and writes and args.max_steps > 0:
            row = {} if args.system_prompt is None else with_system({}, args.system_prompt, writes)
            train_dataset = [row] * args.rows_per_step  # the environment writes the prompts
        if train_dataset is None:
            if routed:
                raise ValueError(
                    "environment_factory with several environments requires a `train_dataset`: rows with a `prompt` "
                    "column, and a column `environment`"
                )
            remedy = "; or set max_steps, and let the environment write the prompts" if pool else ""
            raise ValueError(f"`train_dataset` is required: {self.needed_rows}{remedy}")
        of_task = isinstance(train_dataset, Source) and args.task != "arithmetic"  # the default has no system prompt
        if args.system_prompt is not None and not written and not of_task:
            raise ValueError("only tasks read system_prompt; put it before the prompts of train_dataset")
        self.source = as_source(train_dataset, seed=args.seed, shuffle=args.shuffle_dataset, needed=self._most_rows())
        train_rows = as_rows(self.source.rows, "train_dataset.rows")
        self.held_out = setup.read_held_out(eval_dataset, args.max_eval_samples)
        self.rewards = self._make_rewards(reward_funcs, reward_processing_classes)
        self.made = made = setup.make_policy(
            model, processing_class, args, ranks, wrapper, self.rewards, pool is not None, train_rows
        )
        self.policy, self.tokenizer, self.plan = made.policy, made.tokenizer, made.plan
        stops = stop_token_ids(self.policy, self.tokenizer)
        if self.policy.module.generation_config is not None:  # as transformers' trainers: checkpoints name these tokens
            self.policy.module.generation_config.eos_token_id = stops[0] if len(stops) == 1 else list(stops)
        self.prompts = Prompts.of(self.tokenizer, args, pool, stops)
        if self.rewards is not None:
            reads_steps = getattr(args, "process_rewards", "outcome") == "token"  # step rewards per token
            place = self.rewards.device(self.policy.device, args.reward_device)
            self.rewards.place(place, self.tokenizer if reads_steps else None)
        self.digests = {"model": made.digest, "data": digest_of_rows(train_rows)}
        if ranks.size > 1:
            held_out = digest_of_rows([row for rows in self.held_out.values() for row in rows])
            rows = (self.digests["data"], len(self.source))
            refuse_differences(ranks, **shared_settings(args), training_rows=rows, held_out_rows=held_out)
        self.state = TrainerState(
            0, setup.count_steps(args, len(self.source)), 0.0, args.max_completion_length,
            logging_steps=args.logging_steps, eval_steps=args.eval_steps or 0, save_steps=args.save_steps or 0,
            num_train_epochs=args.num_train_epochs,
            is_world_process_zero=ranks.lead, is_local_process_zero=ranks.lead,
        )  # fmt: skip
        self.timer = StageTimer(self.policy.device, peak_flops(self.policy.device, self.policy.dtype))
        self.sampling = SamplingParams(max_tokens=args.max_completion_length, stop_token_ids=stops)
        self.optimizer = MasterAdamW(
            self.policy.module, learning_rate=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon, weight_decay=args.weight_decay, optim=args.optim,
        )  # fmt: skip
        self.schedule = make_schedule(
            self.optimizer, args.lr_scheduler_type, warmup_steps=args.warmup_steps,
            total_steps=self.state.max_steps * args.updates_per_step, further=args.schedule_kwargs,
        )  # fmt: skip
        micro_batch = args.max_tokens_per_microbatch or (self.plan.most_tokens if self.plan else MICRO_BATCHES[0])
        self.learner = Learner(
            self.policy, self.optimizer, self.schedule, max_grad_norm=args.max_grad_norm,
            max_tokens=micro_batch, timer=self.timer, ranks=ranks,
        )  # fmt: skip
        self.sleeps = self.plan is not None and self.plan.released
        self.engine = None
        if self.rewards is not None:  # without rewards, no completions are generated
            self.engine = make_backend(self.policy.for_rollouts, args, self._bytes_to_come, self.sleeps)
            if isinstance(self.engine, HFBackend) and self.plan and self.plan.lanes and math.isfinite(self.plan.room):
                self._limit_lanes()
        self.live = None if args.serve_port is None else self._make_live()
        self._prepare()
        self.inputs = inputs_of(args, model)
        self.copies = HostCopies()
        self.optimizer.adamw.register_step_pre_hook(self.copies.before_update)
        self.panels, self.log, self.written = panels, None, False  # written: a script has written to the run folder
        self.checked = False  # whether the rows are valid
        self.told = set()  # notes of evaluations
        self.callbacks = Callbacks(
            callbacks, self.state, self.model, self.tokenizer, self.optimizer.adamw, self.schedule, ranks
        )
        # TRL's scripts pass the checkpoint to `train`, so an existing run is opened only there.
        if log or not may_go_on(args, ranks):
            self._open(log)
        else:
            self.callbacks.args = Arguments(args, ranks, Path(args.output_dir), bool(self.held_out))
        try:
            self.callbacks.call("on_init_end")
        except BaseException:
            if self.log is not None:  # the caller gets no trainer that could release the folder
                self.log.close()
            raise

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for kind in cls.__mro__ if not issubclass(GRPOTrainer, kind) for name in vars(kind)}
        if never := sorted(own & HOOKS):
            raise TypeError(f"{cls.__name__} overrides {', '.join(never)}, which only TRL's trainer calls")

    # Setup before the first step. Supervised training overrides some of these methods.

    def _most_rows(self) -> int | None:
        """Return the maximum number of rows that max_steps can draw, or None if max_steps is not set."""
        args = self.args
        batches = args.dynamic_sampling or 1
        return args.max_steps * batches * args.oversampled(args.prompts_per_step) if args.max_steps > 0 else None

    def _make_environments(self, tools, factory) -> Environments | None:
        return factory if isinstance(factory, Environments) else find_environments(self.args, tools or (), factory)

    def _make_rewards(self, reward_funcs, tokenizers) -> Rewards | None:
        if isinstance(reward_funcs, Rewards):
            return reward_funcs
        args, own = self.args, self.environment_pool.rewards if self.environment_pool else []
        if reward_funcs is not None and args.reward_funcs:
            raise ValueError("reward_funcs is both an argument and a setting of args; leave one of them out")
        reward_funcs = list(args.reward_funcs) or reward_funcs
        options = prm_options(args, reward_funcs)
        if reward_funcs is None and own:
            functions = []
        else:
            functions = find_rewards(reward_funcs, tokenizers, args.template_kwargs, args.trust_remote_code, options)
        return Rewards([*functions, *own], shaping=shaping(args), **rewards_settings(args, len(own)))

    def _check_rows(self, train_rows: Rows) -> None:
        """Validate all rows that a later step or evaluation may use."""
        self._check_prompts(train_rows)

    def _check_prompts(self, train_rows):
        checks = [function.check_row for function in self.rewards.functions if hasattr(function, "check_row")]
        how = self.prompts, self.policy, self.args.max_completion_length, self._shows_bars, self.ranks, checks
        for rows in (train_rows, *self.held_out.values()):
            together(self.ranks, lambda rows=rows: check_rows(rows, *how), "the check of rows")

    @property
    def _shows_bars(self):  # used before the log exists
        return self.ranks.lead and not (self.args.disable_tqdm or self.args.quiet) and is_terminal(sys.stderr)

    def _limit_lanes(self):
        """Let transformers generate only as many completions at once as the plan has memory for."""
        args, fit = self.args, self.plan.lanes // self.args.num_generations  # groups
        if fit < -(-args.prompts_per_step // self.ranks.size):
            # A power of two: the draws depend on it, and a resumed run may find a little less memory.
            most = args.num_generations * 2 ** (max(1, fit).bit_length() - 1)
            self.engine.max_num_seqs = min(self.engine.max_num_seqs, max(most, args.eval_num_generations))

    def _make_live(self):
        """Make the server of the policy."""
        from fastgrpo.rollout.engine import RolloutEngine
        from fastgrpo.serving.live import LiveServer

        if self.ranks.size > 1 or not isinstance(self.engine, RolloutEngine):
            raise ValueError(
                "serve_port works in a single process whose completions come from the engine of this package; leave it "
                "out, or set rollout_backend=fast"
            )
        longest = max(1024, 2 * self.args.max_completion_length)
        live = LiveServer(self.policy.for_rollouts, self.tokenizer, self.args.serve_port, longest, self._bytes_to_come)
        self.engine.after_step = self.learner.after_backward = live.turn
        self.learner.after_update = live.updated
        return live

    def _bytes_to_come(self):
        """Return the bytes that will be allocated beside the KV cache, in addition to those already allocated."""
        come = self.optimizer.bytes_to_come(self.policy.device, gradients=self.plan is None)
        return come + (self.plan.passing if self.plan else 0)

    def _prepare(self):
        """Create the sampling parameters, the reference, the collector and the update of GRPO."""
        args = self.args
        self.sampling = dataclasses.replace(
            self.sampling, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )  # fmt: skip
        # Called by position, as in TRL: its second parameter may have any name.
        rollout_func = self.rollout_func and (lambda prompts: self.rollout_func(prompts, self))
        self.collector = Collector(
            self.source, self.prompts, self.engine, self.rewards, self.sampling, args, self.timer, self.ranks,
            rollout_func,
        )  # fmt: skip
        self.ahead = self.collector.ahead
        if args.max_staleness:
            if self.ranks.size > 1 or self.policy.lockstep or rollout_func is not None:
                raise ValueError(
                    "max_staleness works in a single process with --parallel ddp and without rollout_func; set it to 0"
                )
            self.learner.after_backward = self.ahead.poll
        self.reference = make_reference(
            self.policy, args.beta, device="cpu" if args.ref_storage == "cpu" else None,
            quantization=None if args.ref_storage == "cpu" else args.ref_storage, moving=args.sync_ref_model,
        )  # fmt: skip
        self.token_text = TokenText(self.tokenizer)
        self.entropy = AdaptiveEntropy(args) if args.use_adaptive_entropy else None
        self.updates = GRPOUpdate(
            self.policy, self.reference, self.learner, args.objective, temperature=args.temperature,
            updates_per_rollout=args.updates_per_rollout, num_iterations=args.num_iterations,
            top_entropy_quantile=args.top_entropy_quantile, off_policy_mask_threshold=args.off_policy_mask_threshold,
            entropy=self.entropy, backward_tolerance=args.head_backward_tolerance,
            corrects_sampler=args.importance_sampling_mode is not None,
            router_aux_loss_coef=self.policy.router_coefficient(args.router_aux_loss_coef),
            # Log-probs of rollout_func may be approximate, and those of older weights differ.
            checks_draws=not (self.rollout_func or args.max_staleness),
        )  # fmt: skip

    def _advice(self):
        return setup.advice(self.args)

    # The run folder.

    def open(self) -> None:
        """Validate all rows, claim the run folder, and restore the checkpoint to resume from; each only once."""
        self._claim()
        try:
            self._restore()
        except BaseException:
            self._release()
            raise

    def _claim(self):
        """Validate all rows, and claim the run folder, unless it is already claimed."""
        self._validate()
        if self.log is None:
            self._open()

    def _validate(self):
        """Validate all rows once. If they are wrong, release the run folder."""
        try:
            if not self.checked:
                train_rows = as_rows(self.source.rows, "train_dataset.rows")
                everything = train_rows, *self.held_out.values()
                for rows in everything:
                    setup.refuse_images(rows)
                self._check_rows(train_rows)
                if self.rewards is not None:
                    self.rewards.columns = dict.fromkeys(name for rows in everything for name in rows.columns)
        except BaseException:
            self._release()
            raise
        self.checked = True

    def _release(self):
        """Release the run folder, and delete what this trainer made in a new one."""
        if self.log is not None:
            self.log.discard()
            self.log = None

    def _open(self, log=None):
        """Claim the run folder, unless `log` has, and create everything that needs it."""
        args = self.args
        self.log = log = log or open_log(args, self.inputs, self.ranks)
        self.restored = None  # the step of the checkpoint, and the state of the random generators then
        self.state.log_history = log.history
        self.checkpoints = Checkpointer(args, log, self.ranks)
        self.watch = Watch(args, self.checkpoints)
        self.profiler = Profiler(args.profile if self.ranks.lead else 0, log.folder, log.say)
        if self.plan and math.isfinite(self.plan.room):
            log.say(f"memory of this run\n{table(self.plan.rows())}")
        if self.ranks.size > 1:
            log.say(f"{self.ranks.size} processes use {self.made.parallel} ({self.made.why})")
        for warning in self._advice() if self.ranks.lead else ():
            logger.warning(warning)
        self.callbacks.args = Arguments(args, self.ranks, log.dir, bool(self.held_out), self.checkpoints.greater)

    def _resume_from(self, checkpoint):
        """Open the run of `checkpoint`; if None, follow the settings."""
        if checkpoint in (None, False):
            return self._claim()
        if self.log is not None and (self.state.global_step or self.log.history or self.written):
            raise ValueError(f"resume_from_checkpoint={checkpoint!r}: this trainer has begun a run; create a new one")
        self._validate()
        resume = "auto" if checkpoint is True else str(checkpoint)
        self._release()
        given = self.args
        self.args = dataclasses.replace(given, resume_from_checkpoint=resume, overwrite_output_dir=False)
        try:
            self._open()
        except BaseException:
            self._release()
            self.args = given  # the next call to train() follows the settings
            raise

    def _restore(self):
        """Restore the checkpoint to resume from, unless it is already restored."""
        log = self.log
        if log.checkpoint is None or self.restored:
            return
        log.folder.check()
        restore(self.parts(), log.checkpoint, self.about(), log.say, self.ranks)
        if self.ranks.lead:
            set_aside(log.folder, self.state.global_step, log.say)
        self.callbacks.restore(self.checkpoints.same)
        self.callbacks.note_saved(self.checkpoints.best)
        self.restored = self.state.global_step, GlobalRNG().state_dict()

    def parts(self) -> dict[str, Stateful]:
        """Return the stateful parts of the run, by their names in checkpoints."""
        parts = {
            "policy": self.policy, "optimizer": self.optimizer, "schedule": self.schedule, "progress": self.state,
            "source": self.source, "checkpoints": self.checkpoints, "log": self.log, "watch": self.watch,
            "rng": GlobalRNG(),
        }  # fmt: skip
        return parts | {name: part for name, part in self._own_parts().items() if part is not None}

    def _own_parts(self):
        collector = self.collector if self.args.process_rewards == "token" else None
        ahead = self.ahead if self.args.max_staleness else None
        return {"reference": self.reference, "entropy": self.entropy, "experience": collector, "ahead": ahead}

    def about(self) -> dict[str, Any]:
        """Return the command, data, model and settings, which are compared when a run resumes."""
        return {
            "command": self.args.command,
            "rows": len(self.source),
            "data_digest": self.digests["data"],
            "model_digest": self.digests["model"],
            "dtype": str(self.policy.dtype),
            "gradient_checkpointing": self.policy.module.is_gradient_checkpointing,
            "max_tokens_per_microbatch": self.learner.dealer.max_tokens,
            "config": dataclasses.asdict(self.args),
        }

    # The loop.

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> Summary:
        """Train to the end, from a checkpoint if there is one to resume.

        On the first SIGINT or SIGTERM, the current step ends and is saved. A second one kills the process at once.

        Args:
            resume_from_checkpoint: The folder of a checkpoint; True for the newest one in output_dir; None to follow
                the settings.

        Returns:
            The summary, which is also written to summary.json. It has the attributes of transformers' `TrainOutput`.

        Raises:
            ValueError: A checkpoint could not be read or written, or the run has already ended.
            KeyboardInterrupt: SIGINT stopped the run. Everything is saved.
            SystemExit: SIGTERM (exit code 143) or a closed output pipe (141) stopped the run. Everything is saved.
        """
        self._resume_from(resume_from_checkpoint)
        with StopSignals(self.ranks) as stop, self.log, self.rewards or nullcontext(), self.live or nullcontext():
            with self.checkpoints, closing(self.ahead):
                stopped_after = self._run(stop)
            if stopped_after is None:
                self.log.terminal.close_bar()
                return finish(self)
        how = f"--resume_from_checkpoint auto --output_dir {self.log.dir}"
        self.log.terminal.last(f"stopped after step {stopped_after}; continue with {how}")
        # When the first rank exits, torchrun kills the others, which may still be writing.
        self.ranks.meet("the end of the other ranks")
        stop.leave()

    def _run(self, stop):
        """Run the remaining steps. Return None at the end of the run, or the step after which it was stopped."""
        log, callbacks = self.log, self.callbacks
        self._restore()
        generators = GlobalRNG().state_dict()
        callbacks.begin()
        if self.restored is None:
            set_seed((self.args.seed + self.ranks.rank) % 2**32)  # reward functions may use the global generators
        else:  # callbacks and an evaluation may have used the generators
            step, of_checkpoint = self.restored
            GlobalRNG().load_state_dict(of_checkpoint if self.state.global_step == step else generators)
        if self.live is not None:
            self.live.start(self.state.global_step * self.args.updates_per_step)
            log.say(f"{self.live.url} serves the policy")
        log.terminal.progress(self.state.max_steps, self.title, done=self.state.global_step)
        epoch = None  # the epoch for which on_epoch_begin was called
        while True:
            callbacks.agree(f"the flags of the callbacks before step {self.state.global_step + 1}")
            self.checkpoints.check()
            if not self._stopping(stop):
                self._evaluate_if_due()
            step, stopping = self.state.global_step, self._stopping(stop)
            last = step >= self.state.max_steps or callbacks.control.should_training_stop
            if last and not stopping:
                if (line := log.flush()) is not None:  # of the steps before an evaluation that ended the run
                    callbacks.call("on_log", logs=line)
                if epoch is not None:
                    callbacks.call("on_epoch_end")
            if stopping or self.checkpoints.due(step, last) or callbacks.control.should_save:
                self._save(step)
            if stopping:
                callbacks.call("on_train_end")
                return step
            if last:
                return None
            if epoch is None:
                epoch = int(self.state.epoch)
                callbacks.call("on_epoch_begin")
            log.terminal.begun()
            callbacks.call("on_step_begin")
            values = self.step()
            callbacks.call("on_step_end")
            callbacks.agree(f"the flags of the callbacks after step {step + 1}")
            last = step + 1 >= self.state.max_steps or callbacks.control.should_training_stop
            line = log.step(step + 1, values, last=last or callbacks.control.should_log)
            log.terminal.advance(**self._shown(values))
            if line is not None:
                log.terminal.logged(step + 1, self._shown(line), line["step_time"])
                callbacks.call("on_log", logs=line)
            if last or int(self.state.epoch) > epoch:
                epoch = None
                callbacks.call("on_epoch_end")

    def _shown(self, values):
        """Select the values for the progress bar or a line. Non-finite values are None in a logged line."""
        chosen = {short: values.get(name) for short, name in self.shown.items()}
        return {short: value for short, value in chosen.items() if value is not None}

    def _stopping(self, stop):  # a signal to one rank stops all ranks after the same step
        return stop.agree(f"the decision whether to stop after step {self.state.global_step}")

    def step(self) -> dict[str, float]:
        """Run one step, from rows to updated weights.

        Returns:
            Its metrics by name.

        Raises:
            ValueError: The run has ended.
        """
        self.open()
        self.log.folder.check()
        started = time.perf_counter()
        self.timer.start()
        with seldom_collected(), self.ranks.waiting(f"step {self.state.global_step + 1}"):
            samples, collected = self.collect()
            samples, updated = self.update(samples)
            values = self.report(samples, updated | collected)
        if "memory/peak_gib" in values:
            if self.engine is not None:  # torch does not count all memory
                beside = self.engine.beside / 2**30
                values["memory/peak_gib"] = max(values["memory/peak_gib"] + beside, self.engine.peak / 2**30)
            peak = values["memory/peak_gib"]
            values["memory/peak_gib"] = max(self.ranks.gather(peak, "the peak of the memory"))
        drawn = sum(len(sample.drawn) for sample in samples)
        # With max_staleness, time/rollout is only the wait for servers.
        drawing = 0.0 if getattr(self.args, "max_staleness", 0) else values["time/rollout"]
        values |= rates(drawn, drawing, time.perf_counter() - started)
        self._warn(values)
        self.profiler.step(values, left=self.state.max_steps - self.state.global_step)
        return values

    def collect(self) -> tuple[list[Sample], dict[str, float]]:
        """Draw and judge the samples of a step, and compute their advantages. Return them and the metrics."""
        return self.collector(self.state)

    def update(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Train the policy on collected samples, and sync the reference if it follows the policy.

        Return the samples, with the results of the update added to the trained ones, and the metrics.
        """
        self._sleep()
        trained, size = [sample for sample in samples if sample.trained], self.args.num_generations
        groups = [trained[i : i + size] for i in range(0, len(trained), size)]
        updated, metrics = self.updates(groups, with_entropy=self._logged)
        updated = iter(updated)
        samples = [next(updated) if sample.trained else sample for sample in samples]
        if self.args.sync_ref_model and (self.state.global_step + 1) % self.args.ref_model_sync_steps == 0:
            self.reference.sync(self.policy, self.args.ref_model_mixup_alpha)
        return samples, metrics

    def _sleep(self):
        """Release the KV cache if the plan says so."""
        if self.sleeps:
            self.engine.sleep()

    def report(self, samples: Sequence[Sample], values: dict[str, float]) -> dict[str, float]:
        """End the step: log samples, and return the metrics of the step by name."""
        state, step = self.state, self.state.global_step + 1
        if "accuracy" in values:
            values |= self.source.metrics()
            level = self.source.state_dict().get("level")
            of_level = level == self.collector.place.get("level", level)  # max_staleness: maybe an earlier level
            if of_level and (news := self.source.observe(values["accuracy"])):
                self.log.say(f"step {step}: {news}")
        if self._logged:
            self._log_samples(step, samples)
        state.global_step = step
        return values | self.timer.stop() | {"num_tokens": state.num_tokens, "epoch": state.epoch}

    def _warn(self, values):
        """Log new warnings about a step. If it ends the run, log the step too."""
        step = self.state.global_step
        try:
            warnings = self.watch.observe(values)
        except ValueError:
            self.log.step(step, values)
            raise
        for warning in warnings:
            if warning.startswith("warning"):
                self.log.warn(step, warning)
            else:  # a note, such as that a loss near 0 is expected
                self.log.say(f"step {step}: {warning}")

    @property
    def _logged(self):  # whether the current step writes a line of metrics.jsonl
        step = self.state.global_step + 1
        return self.args.logs(step) or step == self.state.max_steps

    def _log_samples(self, step, samples):
        log_samples(step, samples, self.args, self.ranks, self.log, self.token_text)

    # Evaluations.

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float] | None:
        """Evaluate on held-out rows. Log the metrics, unless the run has ended.

        Args:
            eval_dataset: Rows, or a dict of them by name. None means the trainer's own.
            metric_key_prefix: Prefix of the names of the metrics.

        Returns:
            The metrics by name, or None if nothing was measured.
        """
        self.open()
        held_out, values = self.held_out, {}
        if eval_dataset is not None:
            held_out = setup.read_held_out(eval_dataset, self.args.max_eval_samples)
        for prefix, rows in zip(setup.prefixes(held_out, metric_key_prefix), held_out.values(), strict=True):
            measured = self._measure(rows, prefix)
            if measured:
                named = evaluated(measured, prefix) | {"epoch": self.state.epoch}
                best = self.args.metric_for_best_model
                if best in measured:  # `evaluated` gives greedy and sampled metrics the same names
                    named[self.callbacks.args.metric_for_best_model] = measured[best]
                values |= measured | named
                self.callbacks.call("on_evaluate", metrics=named)
        if not values and self.state.global_step == 0:
            self.log.say(self.unmeasured)
        return values or None

    def _measure(self, rows, prefix, further=()):
        """Complete and judge held-out rows, and log the metrics together with `further`. Return all by name."""
        if not rows:
            return {}
        args = self.args
        sampling = dataclasses.replace(
            self.sampling, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=0.0,
            repetition_penalty=1.0, seed=args.seed,
        )  # fmt: skip
        self.ahead.settle()
        where = f"the evaluation after step {self.state.global_step}"
        with self.log.terminal.share("evaluate") as progress, self.ranks.waiting(where):
            result = evaluate(
                self.engine, self.prompts, rows, self.rewards, sampling, self.state, progress,
                args.eval_num_generations, self.ranks,
            )  # fmt: skip
        told = result.summary(self.told)
        result = setup.renamed(result, prefix)
        self._sleep()
        further = dict(further) | self._held_out_loss(result.samples, prefix)
        self._write(further | result.metrics())
        name = "" if prefix == "eval" else f" of {prefix}"
        self.log.say(f"step {self.state.global_step}: held-out{name} {told}")
        for text in result.warnings:
            self.log.warn(self.state.global_step, text)
        return further | result.values

    def _held_out_loss(self, samples, prefix):
        """Compute the loss of held-out completions, as TRL's eval_loss."""
        samples = with_advantages(samples, self.rewards, self.args, self.args.eval_num_generations or 1)
        return {f"{prefix}/loss": self.updates.held_out_loss(samples)}

    def _write(self, values):
        """Log metrics of an evaluation, unless the run has ended."""
        if self.log.folder.held:
            line = self.log.write(self.state.global_step, values | {"epoch": self.state.epoch})
            self.callbacks.call("on_log", logs=line)

    def _evaluate_if_due(self):
        """Evaluate at the start (with eval_on_start), at the end, every eval_steps steps, and if a callback asks to.

        A run that was stopped just before an evaluation runs it when resumed.
        """
        state, every, control = self.state, self.args.eval_steps, self.callbacks.control
        step = state.global_step
        due = step % every == 0 if step and every else step == 0 and self.args.eval_on_start
        due = due or step == state.max_steps or control.should_evaluate or control.should_training_stop
        if due and state.evaluated_at != step:
            values = self.evaluate()
            state.evaluated_at = step
            if values is None:
                return
            if step:  # as in transformers, the first model is no candidate
                self.callbacks.note_best(values)
            self.callbacks.agree(f"the flags of the callbacks after the evaluation of step {step}")
            first = setup.prefixes(self.held_out, "eval")[0]
            if f"{first}/accuracy" in values:
                state.accuracy_after = values[f"{first}/accuracy"]
                state.accuracy_before = state.accuracy_after if step == 0 else state.accuracy_before

    # Checkpoints, and the end of a run.

    def _save(self, step):
        """Save a checkpoint, and wait for it if a callback has an on_save."""
        self.checkpoints.save(step, self._snapshot)
        self.callbacks.note_saved(self.checkpoints.best)
        if self.callbacks.any_handles("on_save"):
            self.checkpoints.wait()
        self.callbacks.call("on_save")

    def _snapshot(self):
        self.state.stateful_callbacks = self.callbacks.export()
        card = card_of(self, adapters=self.args.use_peft)
        return Snapshot(self.parts(), self.tokenizer, self.about(), self.copies, self.checkpoints.ranks, card)

    # Attributes and methods used by scripts for transformers' and TRL's trainers.

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model of the policy, or peft's `PeftModel` if it has adapters."""
        return self.policy.module if self.made.wrapper is None else self.made.wrapper

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer, under TRL's name."""
        return self.tokenizer

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The frozen reference; None at beta 0, or if the reference is the policy without its adapters."""
        apart = self.reference is not None and self.reference.policy is not self.policy
        return self.reference.policy.module if apart else None

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus, after the last update if it is adaptive."""
        return self.updates.entropy_coef

    def is_world_process_zero(self) -> bool:
        """True on rank 0."""
        return self.ranks.lead

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback of transformers."""
        self.callbacks.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback."""
        self.callbacks.handler.remove_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback and return it."""
        return self.callbacks.handler.pop_callback(callback)

    save_model = save_model
    push_to_hub = push_to_hub
    log_metrics = log_metrics
    save_metrics = save_metrics
    save_state = save_state
