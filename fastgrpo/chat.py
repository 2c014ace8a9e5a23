"""python -m fastgrpo.chat MODEL: talk to a model, interactively or with --prompt; its answer streams to the terminal.

Where the tokenizer has a chat template, the conversation so far goes into every turn (/new begins another one); without
one, each line is continued as plain text. /exit, or the end of the input, ends it; Ctrl-C ends an answer.
"""

import sys
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, TextStreamer
from transformers.utils import logging

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.data.prompts import shortened, to_prompt
from fastgrpo.policy.load import check_vocabulary, load_model, load_tokenizer, stop_token_ids
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class ChatFlags:
    """What the command takes; sampling is under vLLM's names."""

    model: str
    """A folder or hub id of a causal LM."""
    prompt: str | None = None
    """Answer this alone. None: interactive."""
    system_prompt: str | None = None
    """Goes before the conversation."""
    max_tokens: int = 512
    """Of an answer. Also -n."""
    temperature: float = 1.0
    """Of sampling. 0: greedy."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability. 1: off."""
    top_k: int = 0
    """Draw from this many likeliest tokens. 0: off."""
    seed: int | None = None
    """Of the draws. None: others every time."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 on GPUs, float32 on CPUs."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the GPU where there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off, a model that needs its own is refused."""


class Conversation:
    """The turns so far, with a model that answers the next one."""

    def __init__(self, model, tokenizer, sampling, system_prompt=None):
        """sampling: `SamplingParams`. Raises ValueError where the tokenizer does not fit the model."""
        self.policy = Policy(model)
        check_vocabulary(self.policy, tokenizer)
        self.model, self.tokenizer, self.system_prompt = model, tokenizer, system_prompt
        self.max_tokens = sampling.max_tokens
        stops = stop_token_ids(self.policy, tokenizer)
        # The model's own, with what was asked for and nothing else: its published penalties and filters would sway.
        model.generation_config = GenerationConfig(
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_p=sampling.top_p if sampling.temperature else None,
            top_k=sampling.top_k if sampling.temperature else None,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
        )
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        self.reset()

    def reset(self):
        """Forget the turns."""
        self.messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    @torch.no_grad()
    def answer(self, text):
        """Stream the answer to stdout, and return it. Raises ValueError where the model cannot hold the turns."""
        templated = self.tokenizer.chat_template is not None
        turn = {"role": "user", "content": text}
        prefix = f"{self.system_prompt}\n\n" if self.system_prompt else ""
        prompt = to_prompt({"prompt": [*self.messages, turn] if templated else prefix + text}, self.tokenizer)
        self.policy.check_prompt(prompt.ids, self.max_tokens, f"the prompt {shortened(prompt.prompt)}")
        ids = torch.tensor([prompt.ids], device=self.model.device)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer)
        said = self.tokenizer.decode(out[0, len(prompt.ids) :], skip_special_tokens=True)
        if templated:
            self.messages += [turn, {"role": "assistant", "content": said}]
        return said


def chat(argv):
    """Answer --prompt, or talk until the input ends."""
    flags = parse_flags(
        ChatFlags, argv, prog="python -m fastgrpo.chat", description=__doc__, aliases={"-n": "--max_tokens"}
    )
    sampling = SamplingParams(flags.temperature, flags.top_p, flags.top_k, max_tokens=flags.max_tokens, seed=flags.seed)
    logging.disable_progress_bar()
    trusted = {"trust_remote_code": flags.trust_remote_code}
    tokenizer = load_tokenizer(flags.model, **trusted)
    model = load_model(flags.model, dtype=flags.dtype, device=flags.device, **trusted).eval()
    conversation = Conversation(model, tokenizer, sampling, flags.system_prompt)
    if flags.prompt is not None:
        conversation.answer(flags.prompt)
        return
    kind = (
        "each line is continued as plain text" if tokenizer.chat_template is None else "/new forgets the turns so far"
    )
    print(f"{flags.model} on {model.device}; {kind}, /exit ends")
    talk(conversation)


def talk(conversation):
    """The interactive loop over stdin."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            conversation.reset()
        elif line:
            try:
                conversation.answer(line)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}; /new begins another conversation", file=sys.stderr)


def main(argv=None):
    """Run the command line; returns the exit code: 2 for what a person can mend, told in a line or two."""
    return run_command(chat, argv)


if __name__ == "__main__":
    sys.exit(main())
