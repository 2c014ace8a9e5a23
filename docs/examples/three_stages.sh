#!/usr/bin/env bash
# The three stages of DeepSeek-R1 (arXiv 2501.12948) on the embedded task: a random model learns a few demonstrations,
# GRPO teaches it what they do not, and a fresh model learns what the trained one writes. Run it again to resume.
#   bash docs/examples/three_stages.sh [FOLDER [STEPS]]
set -euo pipefail
runs=${1:-runs/stages} steps=${2:-300}
all=(--task arithmetic --seed 42 --dtype float32)
each=("${all[@]}" --max_steps "$steps" --eval_num_generations 8 --eval_on_start False --resume_from_checkpoint auto)

# 1. Demonstrations show the form, and seldom a carry.
python -m fastgrpo.sft "${each[@]}" --output_dir "$runs/sft"

# 2. GRPO continues from there. The form is measured, not rewarded.
python -m fastgrpo.train "${each[@]}" --model_name_or_path "$runs/sft/checkpoint-$steps" --output_dir "$runs/train" \
  --reward_funcs correctness format_reward --reward_weights 1 0 --eval_steps 150

# 3. The trained policy completes the training prompts, and a fresh model learns the correct completions.
[ -e "$runs/distilled.jsonl" ] || python -m fastgrpo.distill "$runs/train/checkpoint-$steps" "${all[@]}" \
  --num_generations 4 --max_per_prompt 2 --output "$runs/distilled.jsonl"
python -m fastgrpo.sft "${each[@]}" --train_file "$runs/distilled.jsonl" --output_dir "$runs/distilled"

python -m fastgrpo.report "$runs/sft" "$runs/train" "$runs/distilled" --output "$runs/report.html"
