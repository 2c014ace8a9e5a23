r"""python -m fastgrpo.chat MODEL: chat with a model interactively, or answer --prompt. Answers stream to the terminal.

With a chat template, each turn includes the conversation so far, and /new starts a new one. Without a chat template,
the model continues each line as plain text. /exit or the end of the input ends the command; Ctrl-C stops an answer.
--tools and --environment let the model call tools; each call is printed with its answer.
Control characters are printed as escapes such as \x1b; --raw True prints them unchanged.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastgrpo.config.command import escape_controls, parse_flags, quiet_libraries, run_command
from fastgrpo.config.fields import Count, NotNegative, Seed, settings_class
from fastgrpo.config.sections import LoadingConfig, TemplateConfig, TokenFilterConfig, ToolsConfig
from fastgrpo.config.settings import Settings
from fastgrpo.data.prompts import shortened, to_prompt
from fastgrpo.data.records import StopReason
from fastgrpo.ranks import refuse_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastgrpo.rollout.sampling import SamplingParams
    from fastgrpo.tools.environments import Environments


@settings_class
class ChatConfig(TokenFilterConfig, ToolsConfig, TemplateConfig, LoadingConfig, Settings):
    """The settings of the command. Sampling settings have vLLM's names."""

    model: str
    """Chat with this causal LM: a folder, a hub id or a GGUF file."""
    prompt: str | None = None
    """Answer this prompt and exit. None reads prompts until the input ends."""
    system_prompt: str | None = None
    """Start each conversation with this system prompt."""
    max_tokens: Count = 512
    """Stop an answer, or each turn of an answer with tools, after N tokens. -n is short for this flag."""
    temperature: NotNegative = 1.0
    """Sample at this temperature; 0 takes the most likely token."""
    seed: Seed | None = None
    """Seed the sampler. None gives different answers at each start."""
    raw: bool = False
    """Print control characters unchanged; the terminal may execute them."""


def _streamer(tokenizer, raw):
    """Return a streamer of an answer to stdout, which escapes control characters unless `raw`."""
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not raw:
        show = streamer.on_finalized_text
        streamer.on_finalized_text = lambda text, stream_end=False: show(escape_controls(text), stream_end)
    return streamer


class Conversation:
    """A conversation with a model. `answer` adds a turn."""

    def __init__(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", sampling: "SamplingParams",
        system_prompt: str | None = None, raw: bool = False, environments: "Environments | None" = None,
        max_turns: int | None = None, template_kwargs: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        from transformers import GenerationConfig

        from fastgrpo.policy.load import check_vocabulary, stop_token_ids
        from fastgrpo.policy.model import Policy
        from fastgrpo.tools.prompts import Prompts

        self.policy = Policy(model)
        check_vocabulary(self.policy, tokenizer)
        self.model, self.tokenizer, self.system_prompt = model, tokenizer, system_prompt
        self.max_tokens = sampling.max_tokens
        self.raw = raw
        self.stops = stops = stop_token_ids(self.policy, tokenizer)
        self.prompts = Prompts(tokenizer, template_kwargs, environments, stops, max_turns)
        self.dialogue, self.begun = None, 0  # the conversation with tools; how many have begun
        # Replace the model's generation config: its penalties and filters would change the draws.
        drawn = {} if sampling.temperature == 0 else {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k
        }  # fmt: skip
        model.generation_config = GenerationConfig(
            do_sample=bool(drawn), eos_token_id=list(stops), pad_token_id=stops[0], **drawn
        )
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        self.reset()

    def reset(self) -> None:
        """Drop all turns."""
        if self.dialogue is not None:
            self.prompts.environments.give_back([self.dialogue.episode])
            self.dialogue = None
        self.messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    @torch.no_grad()
    def answer(self, text: str) -> str:
        """Stream the answer to stdout."""
        templated = self.tokenizer.chat_template is not None
        turn = {"role": "user", "content": text}
        if self.prompts.environments is not None:
            return self._answer_with_tools(turn)
        prefix = f"{self.system_prompt}\n\n" if self.system_prompt else ""
        given = {"prompt": [*self.messages, turn] if templated else prefix + text}
        prompt = to_prompt(given, self.tokenizer, self.prompts.template_kwargs)
        said = self.tokenizer.decode(self._draw(prompt.ids, prompt.prompt), skip_special_tokens=True)
        if templated:
            self.messages += [turn, {"role": "assistant", "content": said}]
        return said

    def _draw(self, ids, prompt):
        """Draw a turn of at most max_tokens that fits into the context, and stream it."""
        name = f"the prompt {shortened(prompt)}"
        self.policy.check_ids(ids, name)
        self.policy.check_length(len(ids) + 1, f"{name} has {len(ids)} tokens, and with one more it", "shorten it")
        room = min(self.max_tokens, (self.policy.longest or sys.maxsize) - len(ids))
        before = torch.tensor([ids], device=self.model.device)
        streamer = _streamer(self.tokenizer, self.raw)
        mask = torch.ones_like(before)
        out = self.model.generate(before, attention_mask=mask, streamer=streamer, max_new_tokens=room)
        return out[0, len(ids) :].tolist()

    def _answer_with_tools(self, turn):
        """Draw turns and call tools until a turn has no calls."""
        from fastgrpo.tools.dialogue import Dialogue

        last = self.dialogue
        if last is None:
            prompt = self.prompts({"prompt": [*self.messages, turn]})
            self.begun += 1
            dialogue = self.prompts.start({0: prompt}, 1, torch.initial_seed(), self.begun)[0][0].dialogue
            if dialogue.episode.error:
                raise ValueError(f"the environment cannot be reset: {dialogue.episode.error}")
            self._print(dialogue.prompt[-1]["content"][len(turn["content"]) :].lstrip("\n"))
        else:
            ids = last.builder.answer(last.ids, [turn])
            ids = [*last.prompt_ids, *last.ids, *ids]
            dialogue = Dialogue(last.episode, last.builder, ids, self.prompts.max_turns)
        reason = None
        try:
            while reason is None:
                whole = [*dialogue.prompt_ids, *dialogue.ids]
                drawn = self._draw(whole, turn["content"])
                if drawn[-1] not in self.stops:
                    dialogue.transcript([*dialogue.ids, *drawn])
                    reason = StopReason.LENGTH
                    break
                told = len(dialogue.calls)
                room = (self.policy.longest or sys.maxsize) - len(whole) - len(drawn) - 1
                reason = dialogue.answer(drawn, room).result().reason
                for call in dialogue.calls[told:]:
                    self._print(f"[{call['name']} {call['arguments']}: {call['answer']} ({call['latency_s']:.2g} s)]")
        except BaseException:  # Ctrl-C too
            if last is None:
                dialogue.episode.failed = True  # a tool may have been interrupted, so the instance is not used again
                self.prompts.environments.give_back([dialogue.episode])
            raise
        if reason != StopReason.STOP:
            print(f"({reason})")
        self.dialogue = dialogue
        return dialogue.messages[-1]["content"]

    def _print(self, text):
        if text:
            print(text if self.raw else escape_controls(text))


def chat(argv: list[str]) -> None:
    """Answer --prompt, or chat until the input ends."""
    flags = parse_flags(
        ChatConfig, argv, prog="python -m fastgrpo.chat", description=__doc__, aliases={"-n": "--max_tokens"}
    )
    refuse_ranks("chat")
    from fastgrpo.policy.liger_layers import apply_liger
    from fastgrpo.policy.load import load_model, load_tokenizer
    from fastgrpo.rollout.sampling import SamplingParams
    from fastgrpo.tools import find_environments

    quiet_libraries()
    environments = find_environments(flags)
    if environments is not None and environments.routed:
        names = ", ".join(environments.factories)
        raise ValueError(f"--environment {flags.environment} is a dict; add :NAME to choose one of {names}")
    sampling = SamplingParams(flags.temperature, flags.top_p, flags.top_k, max_tokens=flags.max_tokens, seed=flags.seed)
    trusted = {"trust_remote_code": flags.trust_remote_code}
    tokenizer = load_tokenizer(flags.model, **trusted)
    model = load_model(
        flags.model, dtype=flags.dtype, device=flags.device, load_in_4bit=flags.load_in_4bit, **trusted
    ).eval()
    apply_liger(model)
    calls = flags.max_tool_calling_iterations
    turns = None if calls is None else calls + 1
    conversation = Conversation(
        model, tokenizer, sampling, flags.system_prompt, flags.raw, environments, turns, flags.template_kwargs
    )
    if flags.prompt is not None:
        conversation.answer(flags.prompt)
        return
    plain = tokenizer.chat_template is None
    kind = "the model continues each line as plain text" if plain else "/new starts a new conversation"
    print(f"{flags.model} on {model.device}; {kind}, /exit ends the chat")
    talk(conversation)


def talk(conversation: Conversation) -> None:
    """Answer the lines of stdin until it ends."""
    while True:
        try:
            line = input("> ")  # kept as typed: a plain-text model also reads the spaces at its ends
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command = line.strip()
        if command in ("/exit", "/quit"):
            return
        if command == "/new":
            conversation.reset()
        elif command:
            try:
                conversation.answer(line)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}; /new starts a new conversation", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(chat, argv)


if __name__ == "__main__":
    sys.exit(main())
