"""A small server that answers as `trtllm-serve` does, with a Qwen2 model in NumPy, so that it starts at once. It is not TensorRT-LLM.

Options, paths and fields follow TensorRT-LLM's source: `tensorrt_llm/commands/serve.py` (at 00209af1);
`CompletionRequest`, `CompletionStreamResponse` and `ErrorResponse` of `tensorrt_llm/serve/openai_protocol.py` (at 0076e939);
the routes of `tensorrt_llm/serve/openai_server.py` (at 00057725) and `completion_stream_post_processor` of
`tensorrt_llm/serve/postprocess_handlers.py` (at 01bf1923).
"""

from __future__ import annotations

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

REQUEST = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user lora_request prompt_ignore_length use_beam_search top_k top_p_min
    min_p repetition_penalty length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens return_context_logits
    detokenize thinking_token_budget add_special_tokens response_format disaggregated_params priority
    conversation_params
"""
"""Fields of `CompletionRequest`, which refuses other fields."""


class Qwen2:
    """Float32, one sequence at a time, with a cache of keys and values."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights: dict[str, np.ndarray] = {}
        for file in directory.glob("*.safetensors"):
            self.weights |= load_file(file)

    def logits(self, ids_L: list[int], cache: list[Any]) -> np.ndarray:
        """float32 [V]: after the last of these tokens, which follow those in the cache."""
        config, weights = self.config, self.weights
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"] // heads
        rope = config.get("rope_parameters") or config
        past = cache[0][0].shape[1] if cache[0] else 0
        turns = rope.get("rope_theta", 10000.0) ** -(np.arange(0, size, 2) / size)
        angles = np.outer(np.arange(past, past + len(ids_L)), turns)
        angles = np.concatenate([angles, angles], -1).astype(np.float32)
        hidden = weights["model.embed_tokens.weight"][ids_L]
        visible = np.tri(len(ids_L), past + len(ids_L), past, dtype=bool)

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(config["rms_norm_eps"]))
            return weights[f"{name}.weight"] * (x / scale)

        def linear(x: np.ndarray, name: str) -> np.ndarray:
            return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float32(0))

        def split(x: np.ndarray) -> np.ndarray:
            return x.reshape(len(ids_L), -1, size).transpose(1, 0, 2)

        def turned(x: np.ndarray) -> np.ndarray:
            half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
            return x * np.cos(angles) + half * np.sin(angles)

        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x = norm(hidden, f"{layer}.input_layernorm")
            q, k, v = (split(linear(x, f"{layer}.self_attn.{n}_proj")) for n in "qkv")
            q, k = turned(q), turned(k)
            if cache[number]:
                k, v = (np.concatenate(pair, 1) for pair in zip(cache[number], (k, v), strict=True))
            cache[number] = (k, v)
            k, v = (part.repeat(heads // kv_heads, 0) for part in (k, v))
            scores = np.where(visible, q @ k.transpose(0, 2, 1) / np.float32(size**0.5), -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (shares / shares.sum(-1, keepdims=True)) @ v
            mixed = mixed.transpose(1, 0, 2).reshape(len(ids_L), -1)
            hidden = hidden + linear(mixed, f"{layer}.self_attn.o_proj")
            x = norm(hidden, f"{layer}.post_attention_layernorm")
            gate = linear(x, f"{layer}.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate)) * linear(x, f"{layer}.mlp.up_proj")
            hidden = hidden + linear(inner, f"{layer}.mlp.down_proj")
        last = norm(hidden[-1], "model.norm")
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return np.asarray(head @ last, np.float32)


def chosen(logits_V: np.ndarray, request: dict[str, Any], rng: np.random.Generator) -> int:
    """A token under temperature, top-k and top-p."""
    if request["temperature"] == 0:
        return int(logits_V.argmax())
    scaled = logits_V.astype(np.float64) / request["temperature"]
    order = np.argsort(-scaled)[: request.get("top_k") or None]
    probs = np.exp(scaled[order] - scaled.max())
    probs /= probs.sum()
    probs *= (np.cumsum(probs) - probs) < request.get("top_p", 1.0)
    return int(rng.choice(order, p=probs / probs.sum()))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name: str
    model: Qwen2
    longest: int

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": self.name, "object": "model"}]}
        known = self.path in {"/health", "/v1/models"}
        self.answer(200 if known else 404, models if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self.answer(404, {"detail": "Not Found"})
        elif other := request.keys() - set(REQUEST.split()):
            self.answer(400, {"error": f"Extra inputs are not permitted: {sorted(other)}"})
        elif len(request["prompt"]) >= self.longest:
            message = f"The prompt length {len(request['prompt'])} exceeds {self.longest}"
            self.answer(400, {"object": "error", "message": message, "code": 400})
        else:
            self.stream(request)

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode() if value else b""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, request: dict[str, Any]) -> None:
        """A chunk for every token, until the sample ends or its connection does."""
        assert (request["stream"], request["detokenize"], request["ignore_eos"]) == (
            True,
            False,
            True,
        )
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        cache: list[Any] = [None] * self.model.config["num_hidden_layers"]
        rng, ids, count, reason = np.random.default_rng(), request["prompt"], 0, None
        while reason is None:
            logits_V = self.model.logits(ids, cache)
            token = chosen(logits_V, request, rng)
            ids, count = [token], count + 1
            if token in request["stop_token_ids"]:
                reason = "stop"
            elif count == request["max_tokens"]:
                reason = "length"
            choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids}
            choice |= {"finish_reason": reason, "stop_reason": None}
            chunk = {"object": "text_completion", "model": self.name, "choices": [choice]}
            if not self.piece(f"data: {json.dumps(chunk)}\n\n"):
                return
        self.piece("data: [DONE]\n\n")
        self.piece("")

    def piece(self, text: str) -> bool:
        """Send a piece of the answer; whether the client still listens."""
        try:
            self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        except OSError:
            self.close_connection = True
        return not self.close_connection

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tokenizer")
    parser.add_argument("--extra_llm_api_options", type=Path)
    given = parser.parse_args()
    options = json.loads(given.extra_llm_api_options.read_text())
    print("options", options, flush=True)
    if "fail" in options:
        sys.exit(options["fail"])
    Handler.longest = options["max_seq_len"]
    Handler.name, Handler.model = options.get("pose_as", given.model.name), Qwen2(given.model)
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
