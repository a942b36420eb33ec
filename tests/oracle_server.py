"""`OracleServer`: an engine behind HTTP that is not ours, its sampler the oracle's and its model a hash.

It speaks vLLM's and SGLang's routes in their shapes, and can be told to break rules or to be out of order.
"""

from __future__ import annotations

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import oracle
from keepmask.params import SamplingParams

VOCAB_SIZE = 256
EOS = 2
SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class OracleServer:
    """Serves from the start of the block to its end.

    semantics: the profile it follows. noise: nats by which its logits differ from one request to the next.
    masks: "on", "asked" or "off". rules: broken ones, of "bias_last" (added after the temperature), "stop_free"
    (min_tokens ignored), "output_only" (repetition does not see the prompt), "stray" (draws outside the row), "uneven"
    (rows of equal completions differ), "raw" (logprobs as of before any step), "greedy_refused", "greedy_crashes",
    "silent" (it crashes without a word where masks are unbounded, as vLLM 0.32 does).
    version: whether it tells what it is.
    broken: a function from path and parsed body to (status, text), or None to answer as usual.
    """

    def __init__(
        self, *, semantics="vllm", noise=0.0, masks="on", rules=(), broken=None, tokenizer=False, version=True
    ):
        self.semantics, self.noise, self.masks, self.rules = semantics, noise, masks, set(rules)
        self.broken, self.tokenizer, self.version = broken, tokenizer, version
        self.rng = np.random.default_rng(0)
        self.num_requests = 0
        self.headers = []

    def __enter__(self):
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 2**16  # head and body in one packet

            def do_GET(self):
                self.send(*engine.told(self.path))

            def do_POST(self):
                engine.headers.append(dict(self.headers))
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send(*engine.answer(self.path, body))

            def send(self, status, text):
                content = text.encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                if status == 307:
                    self.send_header("location", "http://elsewhere/")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def told(self, path):
        told = {"/v1/models": {"data": [{"owned_by": "oracle"}]}, "/version": {"version": "1.2"}}
        told["/server_info"] = told["/version"]
        return (200, json.dumps(told[path])) if path in told and self.version else (404, "{}")

    def answer(self, path, body):
        self.num_requests += 1
        if self.broken is not None and (fault := self.broken(path, body)) is not None:
            return fault
        routes = {"/inference/v1/generate": self.vllm, "/generate": self.sglang}
        if self.tokenizer:
            routes |= {"/tokenize": self.tokenize, "/detokenize": self.detokenize}
        if path not in routes:
            return 404, json.dumps({"detail": "Not Found"})
        return routes[path](body)

    # The routes

    def vllm(self, body):
        params = dict(body["sampling_params"])
        asked = params.pop("return_sampling_mask", False)
        params["bad_words"] = [list(word.encode()) for word in params.get("bad_words", [])]
        if params["temperature"] == 0 and "greedy_refused" in self.rules:
            return 400, json.dumps({"error": {"message": "return_sampling_mask requires temperature > 0."}})
        if (params["temperature"] == 0 or params["top_k"] == 0) and "silent" in self.rules:
            return 500, json.dumps({"error": {"message": ""}})
        if params["temperature"] == 0 and "greedy_crashes" in self.rules:
            return 500, json.dumps({"error": {"message": "CUDA error"}})
        choices = []
        for index, steps in enumerate(self.complete(body["token_ids"], params)):
            choice = {"index": index, "token_ids": [step.token_id for step in steps], "finish_reason": "length"}
            if self.masks == "on" or (self.masks == "asked" and asked):
                choice["sampling_mask"] = [[] if s.support is None else s.support.tolist() for s in steps]
            if params.get("logprobs") is not None:
                content = []
                for step in steps:
                    logprobs = self.logprobs(step)
                    top = sorted(logprobs, key=lambda token_id: -logprobs[token_id])[: params["logprobs"]]
                    content.append({"top_logprobs": [{"token_id": t, "logprob": logprobs[t]} for t in top]})
                choice["logprobs"] = {"content": content}
            choices.append(choice)
        return 200, json.dumps({"request_id": "r", "choices": choices})

    def sglang(self, body):
        params = {SGLANG_NAMES.get(name, name): value for name, value in body["sampling_params"].items()}
        assert not {"bad_words", "allowed_token_ids", "n"} & set(params)
        answers = []
        assert len({tuple(prompt) for prompt in body["input_ids"]}) == 1
        for steps in self.complete(body["input_ids"][0], {**params, "n": len(body["input_ids"])}):
            meta = {"finish_reason": {"type": "length"}, "output_token_sampling_mask_length": len(steps)}
            if body["return_sampling_mask"] and self.masks == "on":
                # by probability, and the whole vocabulary listed
                order = [np.argsort(-step.logprobs, kind="stable") for step in steps]
                meta["output_token_sampling_mask"] = [s.ids[o].tolist() for s, o in zip(steps, order, strict=True)]
                meta["output_token_sampling_logprobs"] = [
                    np.float32(s.logprobs[o]).tolist() for s, o in zip(steps, order, strict=True)
                ]
            answers.append({"text": "", "output_ids": [step.token_id for step in steps], "meta_info": meta})
        return 200, json.dumps(answers)

    def tokenize(self, body):
        return 200, json.dumps({"tokens": list(body["prompt"].encode())})

    def detokenize(self, body):
        return 200, json.dumps({"prompt": bytes(body["tokens"]).decode(errors="replace")})

    # The engine

    def complete(self, prompt, params):
        words = params.pop("bad_words", [])
        fields = SamplingParams(**{name: value for name, value in params.items() if name != "logprobs"})
        for index in range(fields.n):
            output, steps = [], []
            while len(output) < fields.max_tokens:
                step = self.step(prompt, output, fields, words, index)
                steps.append(step)
                output.append(step.token_id)
                if output[-1] in fields.stop_token_ids or (output[-1] == EOS and not fields.ignore_eos):
                    break
            yield steps

    def step(self, prompt, output, params, words, index):
        z = logits([*prompt, *output]) + np.float32(self.noise * self.rng.standard_normal(VOCAB_SIZE))
        changes = {}
        if "bias_last" in self.rules and params.temperature > 0:
            bias = {token_id: value * params.temperature for token_id, value in params.logit_bias.items()}
            z, changes["logit_bias"] = oracle.logit_bias(z, bias), {}
        if "stop_free" in self.rules:
            changes["min_tokens"] = 0
        step = oracle.step(
            z,
            params.replace(**changes),
            [] if "output_only" in self.rules else prompt,
            output,
            seed=self.num_requests,
            completion_index=index,
            semantics=self.semantics,
            eos_token_ids=[EOS],
            bad_words_token_ids=words,
        )
        return self.broken_step(step, params, index, z)

    def broken_step(self, step, params, index, z):
        if "stray" in self.rules and params.max_tokens == 1 and params.top_k == 3:
            return replaced(step, token_id=int((set(range(VOCAB_SIZE)) - set(step.ids.tolist())).pop()))
        if "uneven" in self.rules and index == 7:
            return replaced(step, support=np.append(step.ids, 255 if step.ids[-1] < 255 else 254))
        if "raw" in self.rules:
            return replaced(step, raw_logprobs=oracle.log_softmax(z))
        return step

    def logprobs(self, step):
        if "raw" in self.rules:
            return dict(enumerate(np.float32(step.raw_logprobs).tolist()))
        return dict(zip(step.ids.tolist(), np.float32(step.logprobs).tolist(), strict=True))


def logits(context):
    """[V] float32, the same for the same context."""
    seed = zlib.crc32(np.asarray(context, np.int32).tobytes())
    return np.float32(3 * np.random.default_rng(seed).standard_normal(VOCAB_SIZE))


def replaced(step, **changes):
    from dataclasses import replace

    return replace(step, **changes)
