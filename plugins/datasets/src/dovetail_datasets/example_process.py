"""The program of a process that makes shards: it reads pickled rows, and writes pickled shards."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

from dovetail.errors import DataError


class ExampleProcess:
    """Calls a function in a child process. The process ends when its input closes, so also if its parent is killed.

    multiprocessing is not used, since its children run the user's main script again.

    Args:
        make: the pickled function. Calling the `ExampleProcess` calls this function in the process, with the same arguments.

    Raises:
        Exception: the function can't be unpickled in the process.
    """

    def __init__(self, make: bytes) -> None:
        command = [sys.executable, "-m", __name__]
        # Otherwise the tokenizer of every process would use threads on all cores.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        # In its own process group, the child does not get Ctrl-C, which this process handles.
        self._process = subprocess.Popen(  # noqa: S603 - of this interpreter
            command, stdin=pipe, stdout=pipe, env=environment, process_group=0
        )
        try:
            self._ask(make)
            self._answer()
        except Exception:
            self.close()
            raise

    def __call__(self, *given: Any) -> Any:
        """Return the function's result from the process.

        Raises:
            DataError: the process has ended.
            Exception: the function raised it in the process.
        """
        self._ask(pickle.dumps(given))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)  # noqa: S301 - of a process of our own
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _ended(self) -> DataError:
        code = self._process.wait()
        return DataError(
            f"a process that tokenises rows ended with the exit status {code}",
            hint="read what the process printed; if memory is short, set data.processes=1",
        )


def main() -> None:
    """Run the calls that the parent process writes to standard input, and write each result to standard output, until the input closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the prints of libraries out of the answers
    make: Any = None
    while True:
        try:
            given = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
            if make is None:
                make, answer = given, None
            else:
                answer = make(*given)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - raised again where it was asked for
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
