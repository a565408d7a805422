"""An agent that drives a browser of its own: it reads pages and clicks until it calls no tool, and writes what it answers.

It starts Chromium (`apt-get install chromium`), and speaks its DevTools protocol over a websocket. The row says in `extra_info` which page.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from itertools import count
from pathlib import Path
from typing import Any

from openai import OpenAI
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
TOOL = {
    "type": "function",
    "function": {
        "name": "click",
        "description": "Click a link of the page by its text.",
        "parameters": {"type": "object", "properties": {"link": {"type": "string"}}},
    },
}
CLICK = "(found => found && [found.click()])([...document.links].find(link => link.innerText.trim() === %s))"
LOADED = "document.URL !== 'about:blank' && document.readyState === 'complete'"


class Page:
    """The page of a headless browser with a profile of its own, in this folder.

    Args:
        url: that it opens.
    """

    def __init__(self, url: str) -> None:
        profile, root = Path("profile").absolute(), ["--no-sandbox"] * (os.geteuid() == 0)
        options = [f"--user-data-dir={profile}", "--remote-debugging-port=0", "--no-first-run"]
        subprocess.Popen([CHROMIUM, "--headless", "--disable-gpu", *options, *root, url])  # noqa: S603 - the row's page
        place = profile / "DevToolsActivePort"
        port = self._soon(lambda: place.exists() and place.read_text().partition("\n")[0])
        listed = f"http://127.0.0.1:{port}/json/list"
        found = self._soon(lambda: json.load(urllib.request.urlopen(listed)))
        (page,) = [target for target in found if target["type"] == "page"]
        self._socket = connect(page["webSocketDebuggerUrl"], max_size=None)
        self._numbers = count(1)

    def _soon(self, look: Any) -> Any:
        while not (found := look()):
            time.sleep(0.1)
        return found

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; None where the page is left meanwhile."""
        number = next(self._numbers)
        parameters = {"expression": expression, "returnByValue": True}
        asked = {"id": number, "method": "Runtime.evaluate", "params": parameters}
        self._socket.send(json.dumps(asked))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            pass
        return answer.get("result", {}).get("result", {}).get("value")

    def text(self) -> str:
        """Return the text of the page, once it is loaded."""
        self._soon(lambda: self.evaluate(LOADED))
        return self.evaluate("document.body.innerText")

    def click(self, link: str) -> str:
        """Click a link and return the text of the page that it leads to."""
        self.evaluate("window.left = true")
        if not self.evaluate(CLICK % json.dumps(link)):
            return f"error: the page has no link {link!r}"
        self._soon(lambda: self.evaluate("!window.left"))
        return self.text()


row, client = json.loads(os.environ["DOVETAIL_ROW"]), OpenAI()
page = Page(row["extra_info"]["url"])
messages = [*row["prompt"], {"role": "user", "content": page.text()}]
while True:
    message = (
        client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[TOOL])
        .choices[0]
        .message
    )
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            shown = page.click(json.loads(call.function.arguments)["link"])
        except (KeyError, TypeError, ValueError) as error:
            shown = f"error: {error!r}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(
    json.dumps({"answer": message.content, "page": page.text()})
)
