"""What ends a warm start: the test whether greedy completions reach an accuracy."""

import tiny

from fastgrpo.policy.load import prepare
from fastgrpo.tasks.arithmetic import reaches


def test_it_looks_at_the_policy_from_a_step_on_and_compares_the_mean_reward():
    asked = []

    def reward(prompts, completions, goal):
        asked.append(goal)
        return [float(g == "a") for g in goal]

    rows = [{"prompt": text, "goal": goal} for text, goal in (("1+1=", "a"), ("2+2=", "b"))]
    tokenizer = tiny.tokenizer()

    def looks(accuracy):
        policy = prepare(tiny.model(), False, False)
        return reaches(accuracy, policy, tokenizer, rows, reward, max_tokens=2, first=4, every=2)

    look = looks(0.5)
    assert [look(step) for step in range(1, 8)] == [False, False, False, True, False, True, False]
    assert asked == [["a", "b"], ["a", "b"]] and not looks(0.51)(4)
