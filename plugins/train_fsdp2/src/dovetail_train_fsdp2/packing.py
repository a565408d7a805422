"""From ragged samples to padded micro-batches within a token budget. NumPy only; the one place with padding.

There are two layouts. `plain`: a row is a prompt and its response. `shared`: each prompt is computed once, and
the responses to it attend to its keys and values. Of a response of n scored tokens the last one is never fed:
nothing after it is asked for. Padding is on the right, where causal attention never looks.
Legend: N samples, B rows of a micro-batch, G distinct prompts, L padded length, R scored tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail_train_fsdp2.config import Share

WORTHWHILE = {"cpu": 0.85}
"""`auto` shares prompts where that leaves at most this part of the padded tokens: it costs a second forward pass."""
WORTHWHILE_ELSEWHERE = 0.7
"""On accelerators it also costs the fastest attention, which takes no mask; they break even near here."""
READS = ("prompt_ids", "response_ids", "response_mask", "temperature")


@attrs.frozen(kw_only=True, eq=False)
class Cut:
    """The samples of one micro-batch."""

    rows_B: np.ndarray
    """int64 [B], positions in the batch that was cut."""
    shared: bool
    """Whether prompts are computed once."""


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """One micro-batch as the model sees it. Rows without a scored token are left out: B counts the others."""

    ids_BL: np.ndarray
    """int64 [B, L]: plain, prompt and response; shared, the response alone. Right-padded with 0."""
    prompts_GP: np.ndarray | None
    """int64 [G, P]: shared, the distinct prompts, right-padded with 0; plain, None."""
    prompt_of_B: np.ndarray
    """int64 [B]: shared, which prompt each row answers."""
    prompt_lengths_B: np.ndarray
    """int64 [B]."""
    source_R: np.ndarray
    """int64 [R]: where the hidden state that predicts each scored token lies: an index into the flattened
    [B, L] (plain), or into the flattened [G, P] followed by the flattened [B, L] (shared)."""
    targets_R: np.ndarray
    """int64 [R]: the scored tokens."""
    temperature_R: np.ndarray | None
    """float32 [R]; None where all are 1."""
    token_R: np.ndarray
    """int64 [R]: positions of the scored tokens among the micro-batch's T packed response tokens."""
    tokens: int
    """T, masked tokens and rows without a scored token included."""


def check_columns(batch: Batch) -> None:
    """See that a batch can be scored.

    Raises:
        ColumnError: a column is missing or does not line up, a prompt is empty, or a temperature is not positive.
    """
    batch.require(READS, "the training engine")
    prompts, responses, mask = (batch[name] for name in READS[:3])
    if not np.array_equal(responses.offsets, mask.offsets):
        raise ColumnError("response_mask does not line up with response_ids")
    empty = np.flatnonzero((prompts.lengths == 0) & (mask.sum() > 0))
    if empty.size:
        raise ColumnError(
            f"sample {empty[0]} has an empty prompt: nothing predicts its first token",
            hint="start the prompt with the tokenizer's bos token",
        )
    wrong = np.flatnonzero(~(batch["temperature"] > 0))
    if wrong.size:
        raise ColumnError(
            f"sample {wrong[0]} has temperature {batch['temperature'][wrong[0]]}, which logits can't be divided by",
            hint="log-probabilities need a temperature above 0; greedy samples are scored at 1",
        )


def cut(batch: Batch, budget: int, share: Share, device: str = "cpu") -> list[Cut]:
    """Cut a batch into micro-batches of similar lengths and balanced cost, each within the budget.

    Args:
        batch: with the columns in `READS`.
        budget: padded tokens of one micro-batch; a sample that alone exceeds it gets one to itself.
        share: whether to compute prompts once; see `Fsdp2Config.share_prompts`.
        device: type of the device that will compute: `auto` weighs its costs.

    Returns:
        Every sample in exactly one micro-batch; one micro-batch at least.
    """
    prompts_N = batch["prompt_ids"].lengths
    scored_N = _scored_lengths(batch["response_mask"])
    active = np.flatnonzero(scored_N)
    plain = _plain_parts(active, prompts_N + scored_N - 1, budget)
    parts, shared = plain, False
    if share != "never" and active.size:
        prompt_N = _distinct(batch["prompt_ids"])
        in_common = _shared_parts(active, prompt_N, prompts_N, scored_N - 1, budget)
        before, after = sum(p.cost for p in plain), sum(p.cost for p in in_common)
        worthwhile = WORTHWHILE.get(device, WORTHWHILE_ELSEWHERE)
        if share == "always" or after <= worthwhile * before:
            parts, shared = in_common, True
    rows = [np.array(part.rows, np.int64) for part in parts] or [np.empty(0, np.int64)]
    # What has nothing to score costs nothing, but the caller counts on every sample.
    rows[-1] = np.concatenate([rows[-1], np.flatnonzero(scored_N == 0)])
    return [Cut(rows_B=rows_B, shared=shared) for rows_B in rows]


def lay_out(micro_batch: Batch, *, shared: bool) -> Layout:
    """Pad a micro-batch, and note where each scored token's prediction will lie."""
    mask = micro_batch["response_mask"]
    scored_N = _scored_lengths(mask)
    active = np.flatnonzero(scored_N)
    prompts, responses = micro_batch["prompt_ids"], micro_batch["response_ids"]
    prompt_lengths_B, scored_B = prompts.lengths[active], scored_N[active]

    token_R = np.flatnonzero(mask.values)
    row_R = np.repeat(np.cumsum(scored_N > 0) - 1, mask.lengths)[token_R]
    step_R = token_R - mask.offsets[active][row_R]
    fed = responses.take(active)
    if shared:
        prompt_N = _distinct(prompts)[active]
        _, first, prompt_of_B = np.unique(prompt_N, return_index=True, return_inverse=True)
        prompts_GP = _padded([prompts[active[i]] for i in first])
        ids_BL = _padded([row[: n - 1] for row, n in zip(fed, scored_B, strict=True)])
        at_prompt_R = prompt_of_B[row_R] * prompts_GP.shape[1] + prompt_lengths_B[row_R] - 1
        at_response_R = prompts_GP.size + row_R * ids_BL.shape[1] + step_R - 1
        source_R = np.where(step_R == 0, at_prompt_R, at_response_R)
    else:
        prompts_GP, prompt_of_B = None, np.arange(len(active))
        ids_BL = _padded(
            [
                np.concatenate([prompts[i], row[: n - 1]])
                for i, row, n in zip(active, fed, scored_B, strict=True)
            ]
        )
        source_R = row_R * ids_BL.shape[1] + prompt_lengths_B[row_R] - 1 + step_R
    temperature_N = micro_batch["temperature"].astype(np.float32)
    return Layout(
        ids_BL=ids_BL,
        prompts_GP=prompts_GP,
        prompt_of_B=prompt_of_B.astype(np.int64),
        prompt_lengths_B=prompt_lengths_B,
        source_R=source_R.astype(np.int64),
        targets_R=responses.values[token_R].astype(np.int64),
        temperature_R=None if np.all(temperature_N == 1) else temperature_N[active][row_R],
        token_R=token_R,
        tokens=len(mask.values),
    )


class _Part:
    """Rows of one micro-batch, and what it costs in padded tokens."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.cost = self.prompts = self.longest_prompt = self.longest = 0
        self.last_prompt = -1

    def with_row(self, prompt: int, prompt_length: int, length: int) -> tuple[int, ...]:
        """What it would be with one more row: cost, prompts, longest prompt and longest row."""
        prompts = self.prompts + (prompt != self.last_prompt)
        longest_prompt = max(self.longest_prompt, prompt_length)
        longest = max(self.longest, length)
        cost = prompts * longest_prompt + (len(self.rows) + 1) * longest
        return cost, prompts, longest_prompt, longest

    def add(self, row: int, prompt: int, after: tuple[int, ...]) -> None:
        """Take the row; `after` is what `with_row` said."""
        self.rows.append(row)
        self.last_prompt = prompt
        self.cost, self.prompts, self.longest_prompt, self.longest = after


def _plain_parts(active: np.ndarray, lengths_N: np.ndarray, budget: int) -> list[_Part]:
    order = active[np.argsort(-lengths_N[active], kind="stable")]
    rows = [(int(row), int(row), 0, int(lengths_N[row])) for row in order]
    return _balanced(rows, budget)


def _shared_parts(
    active: np.ndarray,
    prompt_N: np.ndarray,
    prompts_N: np.ndarray,
    lengths_N: np.ndarray,
    budget: int,
) -> list[_Part]:
    """Responses to one prompt stay next to each other; prompts with long responses come first."""
    longest = np.zeros(int(prompt_N.max()) + 1, np.int64)
    np.maximum.at(longest, prompt_N[active], lengths_N[active])
    keys = (-lengths_N[active], prompt_N[active], -longest[prompt_N[active]])
    order = active[np.lexsort(keys)]
    rows = [
        (int(row), int(prompt_N[row]), int(prompts_N[row]), int(lengths_N[row])) for row in order
    ]
    return _balanced(rows, budget)


def _balanced(rows: Sequence[tuple[int, int, int, int]], budget: int) -> list[_Part]:
    """As few parts as the budget allows, and among those cuts the one whose largest part is smallest."""
    best = _greedy(rows, budget)
    if len(best) < 2:
        return best
    low, high = 0, budget
    while high - low > max(1, budget // 64):
        middle = (low + high) // 2
        tried = _greedy(rows, middle)
        if len(tried) == len(best):
            best, high = tried, middle
        else:
            low = middle
    return best


def _greedy(rows: Sequence[tuple[int, int, int, int]], budget: int) -> list[_Part]:
    parts: list[_Part] = []
    for row, prompt, prompt_length, length in rows:
        after = parts[-1].with_row(prompt, prompt_length, length) if parts else (budget + 1,)
        if after[0] > budget:
            parts.append(_Part())
            after = parts[-1].with_row(prompt, prompt_length, length)
        parts[-1].add(row, prompt, after)
    return parts


def _scored_lengths(mask: Ragged) -> np.ndarray:
    """int64 [N]: up to and including the last token with mask 1."""
    lengths_N = np.zeros(len(mask), np.int64)
    kept = np.flatnonzero(mask.values)
    row = mask.row_index[kept]
    np.maximum.at(lengths_N, row, kept - mask.offsets[row] + 1)
    return lengths_N


def _distinct(prompts: Ragged) -> np.ndarray:
    """int64 [N]: a number for each distinct prompt, by its tokens."""
    numbers: dict[bytes, int] = {}
    found = (numbers.setdefault(row.tobytes(), len(numbers)) for row in prompts)
    return np.fromiter(found, np.int64, len(prompts))


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [B, L], right-padded with 0."""
    lengths_B = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    longest = int(lengths_B.max(initial=0))
    ids_BL = np.zeros((len(rows), longest), np.int64)
    if rows:
        ids_BL[np.arange(longest) < lengths_B[:, None]] = np.concatenate(rows)
    return ids_BL
