# Settings of three_stages.sh: SmolLM2-135M-Instruct on GSM8K, at a small size for one CPU core.
#   GSM8K=FOLDER bash docs/examples/three_stages.sh runs/smollm2 docs/examples/stages_smollm2.sh
# FOLDER has train.jsonl and test.jsonl. Without GSM8K, they come from the Hugging Face hub.
python -m fastgrpo.recipes.smollm2 models/smollm2-135m
start=(--model_name_or_path models/smollm2-135m)
all=(--task gsm8k ${GSM8K:+--dataset_name "$GSM8K"} --max_completion_length 160 --max_num_seqs 32)
each=(--reward_funcs correctness format_reward length_reward steps_reward --max_eval_samples 24 --eval_num_generations 0
  --logging_steps 1 --max_tokens_per_microbatch 2048)
sft=(--max_steps 24 --batch_size 4 --learning_rate 2e-4)
grpo=(--max_steps 4 --prompts_per_step 1 --num_generations 8 --reward_weights 1 1 1 0.5 --learning_rate 1e-5)
distill=(--max_prompts 64 --num_generations 8 --temperature 0.7)
distilled=(--max_steps 16 --batch_size 4 --learning_rate 2e-4)
