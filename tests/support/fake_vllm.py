"""A small server that answers as vLLM 0.32 does, with faults."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

LOADING = threading.Lock()  # transformers loads in one thread at a time


class Status(Exception):
    """The status of a refusal."""


class FakeVLLM:
    """Attributes:
    faults: Any of "no load" (keeps its weights), "old head" (of a tied head; as vLLM's reload_weights on a CPU),
        "cut" (after 2 tokens), "dead" (drops connections), "silent" (never answers), "hung" (counts no tokens)
        and "stopped" (by a signal: aborts requests).
    drawn: Number of completions that it drew.
    looks: How often its counters were read.
    loras, transfer: With --enable-lora, its adapters by name; the backend of its --weight-transfer-config.
    """

    def __init__(self, model=None, version="0.32.0", logprobs_mode="processed_logprobs", loras=None, transfer=None):
        self.model, self.version, self.mode, self.weights = model, version, logprobs_mode, "default"
        self.faults, self.drawn, self.lock, self.released = set(), 0, threading.Lock(), threading.Event()
        self.looks, self.loras, self.transfer = 0, loras, transfer
        self.going, self.between = threading.Event(), lambda: None  # called between two tokens of a completion
        self.going.set()
        self.before = lambda body: None  # called with each request for completions
        handler = type("Handler", (Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def stop(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def load_policy(self, path):
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(path)
        if "old head" in self.faults and self.model is not None:
            model.lm_head.weight = self.model.lm_head.weight
        if "no load" not in self.faults:
            self.model = model

    def load_lora_adapter(self, lora_name, lora_path):
        if lora_name in self.loras:
            raise Status(400)
        with LOADING:
            model = PeftModel.from_pretrained(copy.deepcopy(self.model), lora_path)
        self.loras[lora_name] = self.model if "no load" in self.faults else model
        return "Success"

    @torch.no_grad()
    def logps(self, ids, temperature, model="policy"):
        if model not in ("policy", *(self.loras or ())):
            raise Status(404, "does not exist")
        module = self.model if model == "policy" else self.loras[model]
        return (module(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    def generate(self, token_ids, sampling_params, cache_salt=None, model="policy"):
        p, choices = sampling_params, []
        assert p["temperature"] > 0 or p["n"] == 1
        for index in range(p["n"]):
            ids, content, versions = list(token_ids), [], []
            generator = torch.Generator().manual_seed(p["seed"] + index)
            while len(content) < (2 if self.faults & {"cut", "stopped"} else p["max_tokens"]):
                if content:
                    self.between()
                self.going.wait(30)
                logps, at = self.logps(ids, p["temperature"] or 1.0, model)[-1], len(content)
                versions.append({"version": self.weights, "start": at, "end": at + 1})
                chosen = torch.multinomial(logps.exp(), 1, generator=generator) if p["temperature"] else logps.argmax()
                ids.append(chosen.item())
                content.append({"token_id": ids[-1], "logprob": logps[ids[-1]].item()})
                if ids[-1] in p["stop_token_ids"]:
                    break
            self.drawn += 1
            choices.append({"index": index, "token_ids": ids[len(token_ids) :], "logprobs": {"content": content},
                            "finish_reason": "abort" if "stopped" in self.faults else "stop",
                            "weight_versions": versions})  # fmt: skip
        return {"prompt_logprobs": None, "choices": choices[::-1]}

    def answer(self, route, body):
        if route == "/version":
            return {"version": self.version}
        if route.startswith("/server_info"):
            options = {"lora_config": self.loras is not None or None, "model_config": {"logprobs_mode": self.mode}}
            options["weight_transfer_config"] = {"backend": self.transfer}
            return {"vllm_config": options, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.loras is not None}}
        if route == "/get_world_size":
            return {"world_size": 2}
        if route == "/collective_rpc":
            return getattr(self, body["method"])(*body["args"])
        if route == "/v1/load_lora_adapter":
            return self.load_lora_adapter(**body)
        if route == "/v1/unload_lora_adapter":
            return f"Success: {self.loras.pop(body['lora_name'])}"
        if route == "/update_weight_version":
            self.weights = body["new_version"]
            return {"success": True}
        if route == "/inference/v1/generate":
            self.before(body)
            with self.lock:
                return self.generate(**body)
        if route in ("/pause?mode=keep", "/resume"):
            return (self.going.set if route == "/resume" else self.going.clear)()
        if route == "/v1/models":
            return {"data": [{"id": name} for name in ("policy", *(self.loras or ()))]}
        if route == "/metrics":
            self.looks += 1
            return f"# HELP\nvllm:generation_tokens_total{{engine='0'}} {0 if 'hung' in self.faults else self.looks}.0"
        if route == "/v1/completions":
            assert self.going.is_set(), "the server is paused"
            ids, logps = body["prompt"], self.logps(body["prompt"], body["temperature"], body["model"])
            scored = [{str(token): {"logprob": logps[i, token].item()}} for i, token in enumerate(ids[1:])]
            return {"choices": [{"prompt_logprobs": [None, *scored]}]}
        assert route == "/health"
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        try:
            reply, code = self.fake.answer(self.path, body), 200
        except Exception as error:
            code = error.args[0] if isinstance(error, Status) else 500
            reply = {"error": {"message": str(error)}}
        if "silent" in self.fake.faults:
            self.fake.released.wait()
        if self.fake.faults & {"dead", "silent"}:
            self.close_connection = True
            return
        data = b"" if reply is None else (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_):
        pass
