"""Stands for an interpreter with vLLM: takes the arguments of its server, and answers as one whose judge does what it reads.

A judge that reads `die` kills its server; one that reads `die once` does so unless the file beside the log says that it has.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {})
        elif self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.answer(401, {"error": "Unauthorized"})
        else:
            self.answer(200, {"data": [{"id": given["served-model-name"]}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.answer(401, {"error": "Unauthorized"})
            return
        text = body["messages"][-1]["content"]
        died = Path(os.environ["DIED"])
        if "die" in text and not ("once" in text and died.exists()):
            died.write_text("yes")
            print("something has gone wrong", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        said = f"devices {devices}, {given['tensor-parallel-size']} of them. score: 1"
        message = {"role": "assistant", "content": said}
        self.answer(200, {"choices": [{"message": message}], "usage": {"total_tokens": 9}})

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[3:])
if "refuse" in given:
    sys.exit(f"(APIServer pid=7) {given['refuse']}")
print("serving", os.getpid(), flush=True)
ThreadingHTTPServer((given["host"], int(given["port"])), Handler).serve_forever()
