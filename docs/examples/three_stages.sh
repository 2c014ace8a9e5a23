#!/usr/bin/env bash
# The three stages of DeepSeek-R1 (arXiv 2501.12948): SFT of a model on demonstrations, GRPO, and SFT of the same first
# model on completions of the trained one. Run the script again to resume it.
#   bash docs/examples/three_stages.sh [FOLDER [SETTINGS]]
# SETTINGS changes the variables below, as stages_smollm2.sh does. The default is the built-in example, a random model.
set -euo pipefail
runs=${1:-runs/stages}
all=(--task arithmetic --seed 42 --dtype float32) # flags of every command
start=() # the first model
each=(--reward_funcs correctness format_reward steps_reward --eval_num_generations 8) # flags of every training
sft=(--max_steps 240)
grpo=(--max_steps 280 --eval_steps 140 --reward_weights 1 0 0 --learning_rate 3e-4 --beta 0.005)
distill=(--num_generations 4)
distilled=(--max_steps 300)
if [ $# -gt 1 ]; then source "$2"; fi
each=("${all[@]}" "${each[@]}" --resume_from_checkpoint auto)
result() { ls -dv "$runs/$1"/checkpoint-* | tail -n 1; }

# 1. SFT on demonstrations. They teach the form.
python -m fastgrpo.sft "${each[@]}" "${start[@]}" "${sft[@]}" --output_dir "$runs/sft"

# 2. GRPO continues from there, with a higher learning rate and a smaller beta than the built-in example, because it
# starts at a lower accuracy. A reward function with the weight 0 is measured, but not rewarded.
python -m fastgrpo.train "${each[@]}" "${grpo[@]}" --eval_on_start False --model_name_or_path "$(result sft)" \
  --output_dir "$runs/train"

# 3. The trained policy generates completions for the training prompts. SFT trains the first model on those with the
# right answer, the form and the right steps.
[ -e "$runs/distilled.jsonl" ] || python -m fastgrpo.distill "$(result train)" "${all[@]}" "${distill[@]}" \
  --output "$runs/distilled.jsonl"
python -m fastgrpo.sft "${each[@]}" "${start[@]}" "${distilled[@]}" --eval_on_start False \
  --train_file "$runs/distilled.jsonl" --output_dir "$runs/distilled"

python -m fastgrpo.report "$runs/sft" "$runs/train" "$runs/distilled" --output "$runs/report.html"
