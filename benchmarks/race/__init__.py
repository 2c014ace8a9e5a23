"""A race of trainers: which is the first to reach an accuracy, on the same model, prompts, reward and settings.

    python -m benchmarks.race [TASK ...] [--trainers NAME ...] [--seeds N ...]      (make race)
    python -m benchmarks.race [TASK ...] --draw

Each contestant trains in a process of its own, alone on the machine, once per seed. Its clock runs only during training
steps. Every few steps the weights are saved, and this process measures the greedy accuracy on held-out prompts, for all
contestants with the same code. results.jsonl gets a line per measurement. With --draw, race-TASK-DEVICE.png and the
tables of docs/benchmarks.md and benchmarks/README.md are made from the newest run of each trainer and seed, on the
machine of the last line.

Before the race, fastgrpo and the chosen contestants make one step on the same completions: loss and gradient norm must
agree.
"""
