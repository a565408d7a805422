"""A stand-in for an interpreter with vLLM: serves a model on `--port` and scores prompts as vLLM's server does. The program ends
after the request whose number is in the model's file `die_after`."""

import os
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import PromptScores

options = dict(word[2:].partition("=")[::2] for word in sys.argv if word.startswith("--"))
scores = PromptScores(Path(options["model"]), options["served-model-name"])
limit = Path(options["served-model-name"]) / "die_after"


def mortal(number, answer):
    if limit.exists() and number > int(limit.read_text()):
        limit.unlink()
        os._exit(3)
    return 200, answer


scores.alter = mortal
handler = scores._server.RequestHandlerClass
ThreadingHTTPServer(("127.0.0.1", int(options["port"])), handler).serve_forever()
