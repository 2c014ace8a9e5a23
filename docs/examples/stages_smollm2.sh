# Settings of three_stages.sh: SmolLM2-135M-Instruct on sums in GSM8K's template, at a small size for one CPU core.
#   bash docs/examples/three_stages.sh runs/smollm2 docs/examples/stages_smollm2.sh
python -m fastgrpo.recipes.smollm2 models/smollm2-135m
start=(--model_name_or_path models/smollm2-135m)
all=(--task sums --max_completion_length 48 --seed 42)
each=(--reward_funcs correctness format_reward length_reward steps_reward --max_eval_samples 50 --eval_num_generations 0
  --logging_steps 1 --max_tokens_per_microbatch 2048)
sft=(--max_steps 12 --batch_size 4 --learning_rate 1e-4)
grpo=(--max_steps 8 --prompts_per_step 2 --num_generations 8 --reward_weights 1 1 1 0.5 --learning_rate 1e-5)
distill=(--max_prompts 64 --num_generations 4)
distilled=(--max_steps 16 --batch_size 4 --learning_rate 1e-4)
