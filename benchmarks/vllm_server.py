"""A vLLM server on a CPU, in the environment that `make .venv-vllm/.installed` creates."""

import os
import signal
import socket
import subprocess
from pathlib import Path

from benchmarks.contestants import ROOT

PYTHON = Path(os.environ.get("FASTGRPO_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))
# Without chunked prefill, because vLLM 0.32 on a CPU fails when it splits the prompt of a request with a seed.
OPTIONS = (
    "--dtype float32 --enforce-eager --no-enable-chunked-prefill --max-num-seqs 256 --host 127.0.0.1 "
    "--enable-scale-out --logprobs-mode processed_logprobs "
    "--worker-extension-cls fastgrpo.integrations.vllm.LoadPolicy"
)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800", "PYTHONPATH": str(ROOT),
}  # fmt: skip


class VLLMServer:
    """A server of the model in a folder, at `url`, started at once; it answers about a minute later."""

    def __init__(self, model: str | Path, max_model_len: int = 512, options: str = "", **environment: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *OPTIONS.split()]
        command += [*options.split(), "--max-model-len", max_model_len, "--port", port]
        self.command = [*map(str, command)]
        self.url, self.environment = f"http://127.0.0.1:{port}", os.environ | ENVIRONMENT | environment
        self.start()

    def start(self) -> None:
        """Start the server again after `kill`."""
        self.process = subprocess.Popen(
            self.command, env=self.environment, cwd=ROOT / "docs", start_new_session=True, stdout=2
        )

    def kill(self) -> None:
        """Kill all processes of the server."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
