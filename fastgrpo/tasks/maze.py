"""A maze for a character model, with state over turns: it looks around, goes, and looks again.

    look()  ->  s    go(s)  ->  ok    look()  ->  nw    go(w)  ->  ok

A maze is a winding path through a grid, unknown to the model. Each room has the way back and the way on. The tool
`look` returns both in this order, `go` goes through one. A wall ends the dialogue. The reward is the share of the path
behind the model at the end: 1 outside. The turns are just enough to look once in each room and to go on.

The warm start shows dialogues of random calls. After `look`, `go` takes one of the sides that are open.
"""

import random
from typing import TYPE_CHECKING

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data.responses import to_call
from fastgrpo.policy.characters import CHAT_TEMPLATE, character_model
from fastgrpo.run.curves import Panel
from fastgrpo.tasks import Task, refuse_data, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEPS = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
BACK = {"n": "s", "e": "w", "s": "n", "w": "e"}
LENGTH, HELD_OUT = 5, 84
MAZES_SEED = 0  # the same mazes are held out in every run
EXAMPLES = 1500
PROMPT = [{"role": "user", "content": "leave the maze"}]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ()"
WARM_START = {"steps": 250, "batch_size": 32, "learning_rate": 3e-3}
PANELS = (
    Panel("Reward", "share of the path", ("reward", "eval/reward"), ("reward", "held-out, greedy")),
    Panel("Out", "share that left the maze", ("accuracy", "eval/accuracy"), ("training", "held-out, greedy")),
    Panel("Calls", "in a step", ("tools/look/calls", "tools/go/calls"), ("look", "go")),
    Panel("Entropy", "nats per token", ("entropy",)),
)


class Maze:
    """A maze and the place of the model in it."""

    def reset(self, path: str) -> None:
        """Start at the beginning of a path, such as "nnesw"."""
        self.path, self.at, self.done = path, 0, False

    def look(self) -> str:
        """Look which sides of the room are open: the way back, and the way on."""
        return "".join(sorted(filter(self._leads, STEPS), key=self._leads))

    def go(self, side: str) -> str:
        """Go to the next room.

        Args:
            side: One of n, e, s and w.
        """
        leads = self._leads(side)
        self.at += leads
        self.done = not leads or self.at == len(self.path)
        return "ok" if leads else "wall"

    def _leads(self, side):
        """Return 1 for the side on which the path goes on, -1 for the way back, and 0 for a wall."""
        return 1 if side == self.path[self.at] else -(self.at > 0 and side == BACK[self.path[self.at - 1]])

    def get_reward(self) -> float:
        """Return the share of the path behind the model."""
        return self.at / len(self.path)


def mazes() -> list[str]:
    """Return all paths that enter no room twice, in random order."""
    paths = [("", (0, 0))]
    for _ in range(LENGTH):
        paths = [
            (path + side, *rooms, (rooms[-1][0] + x, rooms[-1][1] + y))
            for path, *rooms in paths
            for side, (x, y) in STEPS.items()
            if (rooms[-1][0] + x, rooms[-1][1] + y) not in rooms
        ]
    found = [path for path, *_ in paths]
    random.Random(MAZES_SEED).shuffle(found)
    return found


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Train on mazes, and test on held-out ones."""
    refuse_data("maze", config)
    rows = [{"prompt": PROMPT, "path": path} for path in mazes()]
    train, test = rows[HELD_OUT:], rows[:HELD_OUT]
    return Task(lambda: shuffled(train, config), lambda: test, [], lambda: examples(config.seed), environment=Maze)


def examples(seed: int) -> list[dict[str, list]]:
    """Write dialogues of random calls."""
    rng, rows, maze, paths = random.Random(seed), [], Maze(), mazes()[HELD_OUT:]
    for _ in range(EXAMPLES):
        maze.reset(rng.choice(paths))
        messages, seen = [*PROMPT], "nesw"
        while not maze.done and len(messages) < 4 * LENGTH:
            name, given = rng.choice([("look", {}), ("go", {"side": rng.choice(seen)})])
            answer = getattr(maze, name)(**given)
            seen = answer if name == "look" else "nesw"
            messages.append({"role": "assistant", "content": "", "tool_calls": [to_call(name, given)]})
            messages.append({"role": "tool", "name": name, "content": answer})
        rows.append({"messages": messages[:-1]})
    return rows


def make_model(seed: int) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Make a 0.2M-parameter Llama over characters, with random weights."""
    model, tokenizer = character_model(CHARACTERS, seed, positions=160, initializer_range=0.08)  # soon copies
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer
