"""A worker extension for vLLM (`--worker-extension-cls`) that loads a policy. It runs in vLLM's environment."""

import os


class LoadPolicy:
    """Methods that vLLM adds to its workers, for `/collective_rpc`."""

    def load_policy(self, path: str) -> None:
        """Load weights from a folder. On a CPU, `reload_weights` of vLLM 0.32 does not pack a tied head again."""
        os.listdir(path)  # raises before the old weights are freed
        self.model_runner.reload_weights(weights_path=path)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "quant_method"):  # only the last stage of a pipeline has the head
            head.quant_method.process_weights_after_loading(head)
