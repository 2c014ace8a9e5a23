"""The policy: token ids -> hidden states, and the head for the loss.

The engine uses a model only through `Policy`, which wraps a transformers module. Adapters, quantization and sharding
are variants of it. `Policy.logits` is for the few states from which tokens are sampled; the loss never computes the
logits of a whole batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.data.records import Batch, Sample
from fastgrpo.kernels.head_torch import linear_fp32
from fastgrpo.loss.inputs import to_device
from fastgrpo.loss.logprobs import linear_logprob, logit_scale, logit_softcap
from fastgrpo.policy.attention import PackedAttention, attention_of
from fastgrpo.policy.lora import ADAPTER, has_adapters, refuse_wrappers


def narrow_window(config: PretrainedConfig) -> int | None:
    """Return the sliding window of a model if some layers use one shorter than the context, else None."""
    window = getattr(config, "sliding_window", None)
    used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    context = getattr(config, "max_position_embeddings", None)
    return window if used and window is not None and (context is None or window < context) else None


def padded_outputs(model: PreTrainedModel, batch: Batch, **more: Any) -> tuple[Any, torch.Tensor]:
    """Run a packed batch with the model's own attention over padded sequences, for models that cannot be packed.

    Returns the outputs, and the index [N] of each packed token among their S * T tokens. The result is exact: padding
    is on the right, where causal attention ignores it. It is slower: padding is computed, and prompts per completion.
    """
    spans = torch.arange(len(batch.input_ids)).split(batch.lengths)
    prompts, rest = spans[: len(batch.branches)], iter(spans[len(batch.branches) :])
    rows = [torch.cat([prompt, next(rest)]) for prompt, own in zip(prompts, batch.branches, strict=True) for _ in own]
    rows = pad_sequence([*rows, *rest], batch_first=True, padding_value=-1)  # [S, T] indices of packed tokens
    place = torch.empty(len(batch.input_ids), dtype=torch.int64)  # [N] index of each packed token among the S * T
    place[rows[rows >= 0]] = (rows >= 0).flatten().nonzero()[:, 0]  # any copy of a prompt's token will do
    ids = batch.input_ids[to_device(rows.clamp(min=0), batch.input_ids.device)]
    # A mask of ones. Without a mask, transformers tries to detect packed sequences.
    out = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more)
    return out, to_device(place, ids.device)


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers of a model's decoder, without the layers inside of layers. A vision tower is left out."""
    layers, inside = [], set()
    for module in model.get_decoder().modules():  # a layer comes before those inside of it, which Zamba has
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    return layers


Result = TypeVar("Result")


class HeadWeights(NamedTuple):
    """The language-model head: logits = softcap(states @ weight.T + bias), weight [V, D], bias [V] or None.

    softcap(x) = cap tanh(x / cap), as in Gemma 2 and 3, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None


class Context(Protocol):
    """The attention of one forward pass, which defines the tokens that each token attends to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Compute one layer's attention: query [H, N, d], key and value [K, N, d] -> [N, H, d]."""


def head_dim(config: PretrainedConfig) -> int:
    """Return the width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Policy:
    """A transformers causal LM with the interface that the engine needs; `prepare` makes one for training."""

    lockstep = False  # whether all ranks must run every forward and backward pass together, as with sharded weights
    offloads = False  # whether the inputs of recomputed layers are kept in pinned host memory
    _copy = staticmethod(torch.Tensor.copy_)  # copies a value into a weight

    def __init__(self, module: PreTrainedModel, own_attention: bool = False, grouped: bool | None = None):
        self.module = module
        self.own_attention = own_attention  # whether it needs its own attention, over padded sequences, not packed ones
        self.grouped = grouped  # whether it uses grouped matrix products (mixtures of experts); None without a dry run
        self.softcap = logit_softcap(self.shape)
        self.scale = logit_scale(self.shape)  # of the logits; the states are multiplied by it

    @classmethod
    def of(cls, model: "PreTrainedModel | Policy") -> "Policy":
        """Wrap a transformers causal LM, or return a `Policy` unchanged. Raise a ValueError for anything else."""
        if isinstance(model, cls):
            return model
        module = getattr(model, "_orig_mod", model)  # torch.compile's wrapped module
        refuse_wrappers(module)
        if not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is None:
            raise ValueError(
                f"the policy must be a transformers causal LM with its head, got a {type(module).__name__}; "
                "load one from a folder or the hub with fastgrpo.policy.load.load_policy"
            )
        return cls(model)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.module.dtype

    @cached_property
    def shape(self) -> Any:
        """The transformers config of the text layers."""
        return self.module.config.get_text_config()

    @property
    def head(self) -> HeadWeights:
        """The language-model head. Its tensors are the parameters themselves."""
        layer = self.module.get_output_embeddings()
        return HeadWeights(layer.weight, layer.bias, self.softcap)

    @contextmanager
    def gather(self, keep: bool = False) -> Iterator[list[torch.Tensor]]:
        """Provide a view of every unsharded parameter while a rollout runs.

        Sharded weights are gathered, see `WholeCopy.gather`. With `keep`, the next call uses the same addresses, which
        CUDA graphs need.
        """
        yield [parameter.detach() for parameter in self.parameters()]

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and parameters one by one, gathered if sharded."""
        return ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    def within(self, compute: Callable[[], Result]) -> Result:
        """Run a computation that reads the weights: states, head and loss of one micro-batch.

        Sharded weights are gathered during the call, and their gradients are reduced to shards. All ranks must then
        call this equally often.
        """
        return compute()

    def idle_loss(self) -> torch.Tensor:
        """Compute a loss of 0 by a pass over one token, for a rank without samples in a pass of all ranks."""
        batch = Batch.pack([Sample([0], [0], advantage=0.0)], self.device)
        return self.logps(batch).sum() * 0.0

    @property
    def for_rollouts(self) -> "Policy":
        """The policy for rollouts: this one, or an unsharded copy if its weights are sharded."""
        return self

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the policy's own parameters. An update writes them in place, which increments their versions."""
        return list(self.module.parameters())

    @property
    def size(self) -> int:
        """Number of parameters. `NF4Linear` stores 16 of them in 9 bytes."""
        return sum(p.numel() * 16 // 9 if p.dtype == torch.uint8 else p.numel() for p in self.parameters())

    def states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Run packed tokens [N], at positions [N] in their sequences, through the layers. Return [N, D]."""
        return self._scaled(self._packed_outputs(input_ids, position_ids, context).last_hidden_state[0])

    def _packed_outputs(self, input_ids, position_ids, context, **more):
        with attention_of(self.module), self._checkpointing():
            return self.module.base_model(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, context=context, **more
            )

    def _scaled(self, states):
        return states if self.scale == 1 else states * self.scale

    def completion_states(self, batch: Batch) -> torch.Tensor:
        """Compute the hidden states [M, D] that predict a batch's completion tokens."""
        return self._outputs(batch)[0]

    def _outputs(self, batch, **more):
        """Return the states of a batch's completion tokens, the model's outputs, and the place of each token there."""
        if self.own_attention:
            with self._checkpointing():
                out, place = padded_outputs(self.module, batch, **more)
        else:
            context, place = PackedAttention(batch.lengths, batch.input_ids.device, batch.branches), slice(None)
            out = self._packed_outputs(batch.input_ids, batch.position_ids, context, **more)
        return self._scaled(out.last_hidden_state.flatten(0, 1)[place][batch.rows]), out, place

    def states_and_balance(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `completion_states`, and the load-balancing loss of a mixture of experts over the batch's tokens.

        The loss is that of all models of transformers, over all layers (Switch Transformer, arXiv 2101.03961, eq. 4). A
        shared prompt counts once per branch.
        """
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        states, out, place = self._outputs(batch, output_router_logits=True)
        routed = tuple(layer.flatten(0, -2)[place] for layer in out.router_logits)
        counts = [len(own) for own in batch.branches] + [1] * (len(batch.lengths) - len(batch.branches))
        counts = torch.tensor(counts).repeat_interleave(torch.tensor(batch.lengths))
        experts = routed[0].shape[-1]
        counts, chosen = to_device(counts, states.device), self.shape.num_experts_per_tok
        return states, load_balancing_loss_func(routed, experts, chosen, counts)

    def router_coefficient(self, given: float | None) -> float:
        """Return the coefficient of the load-balancing loss; None means the one of the model's config."""
        if "router_logits" not in (getattr(self.module, "_can_record_outputs", None) or {}):
            if given:
                name = type(self.module).__name__
                raise ValueError(f"router_aux_loss_coef={given}: {name} returns no router logits; omit it")
            return 0.0
        return getattr(self.shape, "router_aux_loss_coef", 0.0) if given is None else given

    def logps(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Compute the fp32 log-probs [M] of a batch's completion tokens, in nats."""
        return self.logps_of(self.completion_states(batch), batch.targets, temperature)

    def logps_and_entropy(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Compute [2, M]: the log-probs of a batch's completion tokens, and the entropy of each one's distribution."""
        states = self.completion_states(batch)
        weight, bias, softcap = self.head
        options = {"bias": bias, "logit_softcap": softcap, "temperature": temperature}
        return torch.stack(linear_logprob(states, weight, batch.targets, return_entropy=True, **options))

    def logps_of(self, states: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Compute the fp32 log-probs [M] of tokens [M] from the states [M, D] that predict them."""
        weight, bias, softcap = self.head  # read after the layers, whose forward pass gathers sharded weights
        return linear_logprob(states, weight, targets, bias=bias, logit_softcap=softcap, temperature=temperature)

    def logits(
        self, states: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Compute the logits [R, V] of the few states [R, D] from which tokens are drawn.

        They are fp32 even for 16-bit states, because rounded logits give wrong log-probs. `product` computes
        states @ weight.T with fp32 output; None uses torch.
        """
        weight, bias, softcap = self.head
        logits = (product or linear_fp32)(states, weight)
        if bias is not None:
            logits = logits + bias.float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def check_prompt(self, ids: list[int], max_tokens: int, name: str, limit: str = "max_tokens") -> None:
        """Raise ValueError for a prompt that is empty, does not fit with its completion, or has unknown tokens.

        Errors use `name` for the prompt, and `limit` for the setting of `max_tokens`.
        """
        self.check_ids(ids, name)
        what = f"{name} has {len(ids)} tokens; with {limit}={max_tokens} it"
        self.check_length(len(ids) + max_tokens, what, f"shorten the prompt or lower {limit}")

    def check_length(self, tokens: int, what: str, remedy: str) -> None:
        """Raise if a sequence exceeds the policy's context, or the sliding window under packed attention."""
        if self.context is not None and tokens > self.context:
            raise ValueError(f"{what} exceeds the model's context of {self.context}; {remedy}")
        if self.window is not None and tokens > self.window:
            raise ValueError(
                f"{what} exceeds the sliding window of {self.window} of {type(self.module).__name__}, which the engine "
                f"does not support; {remedy}, or use --rollout_backend hf"
            )

    @cached_property
    def context(self) -> int | None:
        """Maximum tokens of a prompt with its completion; None if the model's config sets no limit."""
        limit = getattr(self.shape, "max_position_embeddings", None)
        rope = getattr(self.shape, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # longer sequences have other frequencies, which depend on the batch
            return min(limit, rope["original_max_position_embeddings"])
        if rope.get("rope_type") == "yarn" and limit is not None:  # the limit may be that before the scaling
            return max(limit, int((rope.get("original_max_position_embeddings") or limit) * rope.get("factor", 1)))
        return limit

    @cached_property
    def window(self) -> int | None:
        """Maximum tokens of a sequence under packed attention, because of a sliding window, or None."""
        return None if self.own_attention else narrow_window(self.shape)

    @property
    def longest(self) -> int | None:
        """Maximum tokens of a sequence: `context` or `window`, whichever is less; None without a limit."""
        return min((limit for limit in (self.context, self.window) if limit is not None), default=None)

    def check_ids(self, ids: list[int], name: str) -> None:
        """Raise ValueError if there are no token ids, or one has no embedding."""
        if not ids:
            raise ValueError(f"{name} has no tokens")
        embeddings = self.module.get_input_embeddings().weight.shape[0]
        if min(ids) < 0:
            raise ValueError(f"{name} has the token id {min(ids)}, which is negative; token ids start at 0")
        if max(ids) >= embeddings:
            raise ValueError(
                f"{name} has the token id {max(ids)}, but the model has only {embeddings} embeddings; use the "
                "tokenizer that the model was trained with"
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights: all, or only the adapters if there are any."""
        weights = self.module.state_dict()
        if has_adapters(self.module):
            return {name: value for name, value in weights.items() if ADAPTER in name}
        return weights

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a state into the policy's own storage, which rollouts and the optimizer use too."""
        mine = self.state_dict()
        if {name: value.shape for name, value in mine.items()} != {name: value.shape for name, value in state.items()}:
            raise ValueError("the weights have other names or shapes than the policy's")
        for name, value in mine.items():
            self._copy(value, state[name])

    @contextmanager
    def _checkpointing(self):
        """Enable gradient checkpointing if gradients are enabled, and keep the inputs of layers on the host if asked.

        A layer checkpoints if its attribute `training` is True, which holds only within this context.
        """
        layers, offloads = [], self.offloads and torch.is_grad_enabled()
        if torch.is_grad_enabled():
            layers = decoder_layers(self.module)
        for layer in layers:
            layer.training = True
        try:
            with torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else nullcontext():
                yield
        finally:
            for layer in layers:
                layer.training = False
