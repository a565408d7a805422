"""Responses of a model to prompts, written as JSON lines in the order of the prompts; a later call continues the file."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import attrs

from dovetail.config import to_mapping
from dovetail.errors import DataError, DovetailError, RequestRefusedError
from dovetail.file_locks import lock
from dovetail.interfaces import (
    Completion,
    DatasetSource,
    InMemoryGroups,
    PluginContext,
    Prompt,
    RolloutRequest,
    RowGroups,
    RunningTime,
    Sample,
    SamplingParams,
    Tokenizer,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import PluginSection, RunConfig
from dovetail.telemetry import append_rows, dump_json, read_rows
from dovetail_datasets import PromptSet, read_prompts, read_tokenizer
from dovetail_inference.models import ModelSource, serving
from dovetail_rollouts import (
    Episodes,
    RolloutPool,
    chat_tools,
    running_episodes,
    together,
    training_sampling,
)

_AT_ONCE = 1024
"""Maximum number of concurrent prompts; a killed process loses at most these."""
_PURPOSE = "generate"


class TextSource(DatasetSource):
    """Reads a prompt from each line of text files, or from given texts.

    Args:
        column: the column of the prompt.
        texts: prompts to use in place of files.
    """

    name = "text"

    def __init__(self, column: str, texts: Sequence[str] = ()) -> None:
        super().__init__(PluginSection(name=self.name), PluginContext())
        self._column, self._texts = column, texts

    def read(self, paths: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return a row for each line that is not blank; for errors see `DatasetSource.read`."""
        return [{self._column: text} for _, text in self._lines(paths)]

    def stream(self, paths: Sequence[str]) -> RowGroups:
        """Return the rows of `read`, each with the file and line that it comes from."""
        return InMemoryGroups(self.read(paths), [where for where, _ in self._lines(paths)])

    def _lines(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        if self._texts:
            return [(f"--prompt, line {n}", text) for n, text in enumerate(self._texts)]
        found = []
        for path in paths:
            try:
                # `splitlines` would also split at U+2028 and at form feeds.
                lines = Path(path).expanduser().read_bytes().decode("utf-8-sig").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"the file {path} can't be read: {error}", hint="name a UTF-8 text file"
                ) from error
            own = [(f"{path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
            if not own:
                raise DataError(
                    f"the file {path} is empty; expected at least one prompt",
                    hint="write one prompt a line",
                )
            found += [(where, line.removesuffix("\r")) for where, line in own]
        return found


def generate(
    config: RunConfig,
    source: ModelSource,
    out: Path,
    *,
    files: Sequence[str] = (),
    texts: Sequence[str] = (),
    say: Callable[[str], None],
) -> None:
    """Write a row for each prompt: `index`, `prompt`, `prompt_tokens`, and `responses`, each with `text`, `tokens` and `finish_reason`.

    Under an agent loop, each response is an episode: it also has a `trajectory`, and a `failure` if the episode failed. `tokens`
    counts the tokens that the policy produced.

    Rows are appended in the order of the prompts. Rows that an earlier call with the same settings wrote are kept, and an
    incomplete last line is repaired. The settings are kept in `OUT.settings.json`.

    Args:
        config: the result of `source.load_config`; `rollout` has the sampling parameters.
        source: the model.
        out: the output file, JSON lines.
        files: files with prompts: any format that data sets read, or text with one prompt per line (`.txt`).
        texts: prompts to use in place of files.
        say: a function that is called with lines about the progress.

    Raises:
        DataError: a file or a prompt is invalid.
        DovetailError: the output file belongs to other settings or is being written by another process, or the engine failed.
    """
    tokenizer = read_tokenizer(config)
    found = _prompts(config, tokenizer, files, texts)
    for what in found.left_out:
        say(f"warning: {what}")
    prompts = found.prompts
    sampling = training_sampling(config)
    settings = {
        "model": source.name,
        "model_files": source.fingerprint(),
        "dtype": config.model.dtype,
        "prompts": _digest(prompts),
        "seed": config.seed,
        "rollout.name": config.rollout.name,
        "rollout.n": config.rollout.n,
        "rollout.agent_loop": to_mapping(config)["rollout"]["agent_loop"],
        **{f"rollout.{key}": value for key, (value, _) in config.rollout.truncation().items()},
        **attrs.asdict(sampling),
    }
    with _output(out, json.loads(json.dumps(settings))):
        append_rows(out, [])  # repairs a torn last line
        done = len(read_rows(out))
        if done == len(prompts):
            say(f"{out} is finished: {done} prompts")
            return
        if done:
            say(f"{out}: continues after {done} of {len(prompts)} prompts")
        with (
            source.on_disk(config) as model,
            serving(config, model, tokenizer) as (pool, context),
            running_episodes(config, context, context.logger) as episodes,
        ):

            async def respond(prompt: Prompt) -> list[dict[str, Any]]:
                request = _request(prompt, sampling, config.rollout.n, config.seed)
                if episodes is None:
                    return [_response(c, tokenizer) for c in await answer(pool, request)]
                return [_episode(s) for s in await run_episodes(pool, episodes, request, prompt)]

            asyncio.run(_write(prompts[done:], respond, out))
        say(f"{out}: {len(prompts)} prompts")


async def answer(pool: RolloutPool, request: RolloutRequest) -> list[Completion]:
    """Generate and return every sample of a request, in the order of `request.streams`, which has one random stream for each sample."""
    async with aclosing(pool.submit(request)) as completions:
        return sorted([c async for c in completions], key=lambda c: c.sample)


async def run_episodes(
    pool: RolloutPool, episodes: Episodes, request: RolloutRequest, prompt: Prompt
) -> list[Sample]:
    """Run an episode for each sample of a request, and return the episodes' samples in order.

    Raises:
        RolloutError: every replica failed, or a replica refused a request.
    """
    found: dict[int, Sample] = {}

    async def run(number: int) -> None:
        name = f"{request.request_id}.s{number}"

        async def ask(part: RolloutRequest, _: RunningTime) -> Completion:
            async with aclosing(pool.submit(part, name)) as completions:
                (completion,) = [c async for c in completions]
            return completion

        alone = attrs.evolve(request, streams=(request.streams[number],))
        try:
            found[number] = await episodes.run(
                alone, prompt, sample_id=name, number=number, ask=ask
            )
        finally:
            pool.end_conversation(name)

    await together(run(number) for number in range(request.n))
    return [found[number] for number in range(request.n)]


def _response(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    ids_T = completion.response_ids
    return {
        "text": tokenizer.decode(ids_T.tolist(), skip_special_tokens=True),
        "tokens": len(ids_T),
        "finish_reason": str(completion.finish_reason),
    }


def _episode(sample: Sample) -> dict[str, Any]:
    row = {"text": sample.text, "tokens": sample.response_length}
    written = sample.row()
    kept = ("finish_reason", "trajectory", "failure")
    return row | {key: written[key] for key in kept if key in written}


async def _write(
    prompts: Sequence[Prompt],
    respond: Callable[[Prompt], Awaitable[list[dict[str, Any]]]],
    out: Path,
) -> None:
    numbers = iter(prompts)
    async with aclosing(_in_order(prompts, respond)) as answers:
        async for responses in answers:
            prompt = next(numbers)
            row = {
                "index": prompt.index,
                "prompt": prompt.raw,
                "prompt_tokens": len(prompt.prompt_ids),
                "responses": responses,
            }
            append_rows(out, [row])


async def _in_order(
    prompts: Sequence[Prompt], respond: Callable[[Prompt], Awaitable[list[dict[str, Any]]]]
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield the responses to each prompt in the order of the prompts, with up to `_AT_ONCE` concurrent prompts."""
    tasks: deque[asyncio.Future[list[dict[str, Any]]]] = deque()
    waiting = iter(prompts)
    try:
        for prompt in prompts:
            while len(tasks) < _AT_ONCE and (following := next(waiting, None)) is not None:
                tasks.append(asyncio.ensure_future(respond(following)))
            try:
                yield await tasks[0]
            except RequestRefusedError as error:
                error.hint = (
                    error.hint or "lower data.max_response_length, or leave this prompt out"
                )
                error.during(str(prompt))
                raise
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _prompts(
    config: RunConfig, tokenizer: Tokenizer, files: Sequence[str], texts: Sequence[str]
) -> PromptSet:
    plain = texts or all(Path(file).suffix.lower() == ".txt" for file in files)
    source = TextSource(config.data.prompt_key, texts) if plain else None
    if not plain and any(Path(file).suffix.lower() == ".txt" for file in files):
        raise DataError(
            "--prompts names .txt files and files of other formats; expected one kind",
            hint="give only .txt files, or only files that `data.train_files` accepts",
        )
    tools = chat_tools(config, tokenizer)
    return read_prompts(config, tokenizer, files, source=source, tools=tools)


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.index} {prompt.prompt_ids.tolist()} {prompt.media}\n".encode())
    return digest.hexdigest()[:16]


def _request(prompt: Prompt, sampling: SamplingParams, n: int, seed: int) -> RolloutRequest:
    streams = tuple(
        SampleStream(
            seed=seed, purpose=_PURPOSE, epoch=0, prompt=prompt.index, sample=sample, attempt=0
        )
        for sample in range(n)
    )
    return RolloutRequest(
        request_id=f"{_PURPOSE}.p{prompt.index}",
        prompt_ids=prompt.prompt_ids,
        sampling=sampling,
        streams=streams,
        media=prompt.media,
    )


@contextmanager
def _output(out: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Hold a lock on `OUT.settings.json` during the block; write `settings` to this file first if there is no output yet.

    Raises:
        DovetailError: the output can't be written, belongs to other settings, or is being written by another process.
    """
    beside = out.with_name(f"{out.name}.settings.json")
    other = "name another file with --out, or remove this one"
    if out.exists() and not beside.exists():
        raise DovetailError(
            f"the file {out} already exists and is not an output of `dovetail generate`: {beside.name} is missing beside it",
            hint=other,
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = beside.open("a+", encoding="utf-8")
    except OSError as error:
        raise DovetailError(
            f"the output file {out} can't be written: {error.strerror}", hint=other
        ) from error
    with file:
        if lock(file.fileno()) is False:
            raise DovetailError(
                f"another process is writing {out}", hint="wait until that process has ended"
            )
        file.seek(0)
        before = next(iter(read_rows(beside)), None)
        if before is None or not out.exists():
            file.truncate(0)
            file.write(dump_json(settings) + "\n")
            file.flush()
        elif before != settings:
            keys = [k for k in {**before, **settings} if before.get(k) != settings.get(k)]
            changes = [f"{k}: {before.get(k)!r} → {settings.get(k)!r}" for k in keys]
            raise DovetailError(
                f"the file {out} was written with other settings: {'; '.join(changes)}", hint=other
            )
        yield
