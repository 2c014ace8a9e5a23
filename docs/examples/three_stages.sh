#!/usr/bin/env bash
# The three stages of DeepSeek-R1 (arXiv 2501.12948) on the built-in example: SFT of a random model on demonstrations,
# GRPO, and SFT of another random model on completions of the trained one. Run the script again to resume it.
#   bash docs/examples/three_stages.sh [FOLDER [STEPS]]
set -euo pipefail
runs=${1:-runs/stages} steps=${2:-300}
all=(--task arithmetic --seed 42 --dtype float32)
each=("${all[@]}" --max_steps "$steps" --eval_num_generations 8 --eval_on_start False --resume_from_checkpoint auto)

# 1. SFT on demonstrations. They teach the format; few of them have a carry.
python -m fastgrpo.sft "${each[@]}" --output_dir "$runs/sft"

# 2. GRPO continues from there. The format is measured, but not rewarded (weight 0).
python -m fastgrpo.train "${each[@]}" --model_name_or_path "$runs/sft/checkpoint-$steps" --output_dir "$runs/train" \
  --reward_funcs correctness format_reward --reward_weights 1 0 --eval_steps 150

# 3. The trained policy generates completions for the training prompts. SFT trains a new model on the correct ones.
[ -e "$runs/distilled.jsonl" ] || python -m fastgrpo.distill "$runs/train/checkpoint-$steps" "${all[@]}" \
  --num_generations 4 --max_per_prompt 2 --output "$runs/distilled.jsonl"
python -m fastgrpo.sft "${each[@]}" --train_file "$runs/distilled.jsonl" --output_dir "$runs/distilled"

python -m fastgrpo.report "$runs/sft" "$runs/train" "$runs/distilled" --output "$runs/report.html"
