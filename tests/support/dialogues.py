"""What tests of dialogues share: a turn builder without a model or a template."""

import json
import re
from types import SimpleNamespace


class Builder:
    """Tokens are characters; a call is <name {...}>, and the answers follow in brackets."""

    def parse(self, ids):
        text = "".join(map(chr, ids))
        calls = [
            {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
            for name, arguments in re.findall(r"<(\w+) (\{.*?\})>", text)
        ]
        message = {"role": "assistant", "content": re.sub("<.*", "", text)} | ({"tool_calls": calls} if calls else {})
        return SimpleNamespace(message=message, malformed="<" in text and not calls)

    def answer(self, prompt_ids, completion_ids, message, messages):
        assert message["role"] == "assistant" and all(answer["role"] == "tool" for answer in messages)
        return ids("".join(f"[{answer['content']}]" for answer in messages))


def ids(text):
    return [*map(ord, text)]


def turn(dialogue, text, room=1000):
    return dialogue.answer(ids(text), room).result(30)
