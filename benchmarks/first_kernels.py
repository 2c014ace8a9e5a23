"""Call the kernels of head and decoding once, under compute-sanitizer: python -m benchmarks.first_kernels.

They are cases of `doctor --check`, so they are already compiled if it ran before. There are few imports, because
everything is slow under the sanitizer.
"""

import torch

from fastgrpo.kernel_checks.cases import CASES, modes_here

NAMES = ("linear_grpo_loss", "linear_logprob, entropy", "group_decode, width 64", "group_decode, width 128")


def main() -> None:
    """Call the kernels that this machine supports."""
    mode = modes_here()[0]
    for case in CASES:
        if case.name in NAMES and mode in case.modes:
            case.trial(mode).ours()
            if mode == "gpu":
                torch.cuda.synchronize()
            print(case.name, flush=True)


if __name__ == "__main__":
    main()
