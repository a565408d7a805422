"""Conversion of ragged samples to a model's input, padded or packed. NumPy only.

There are three layouts. Padded: a row is a prompt and its response. Shared: rows of responses beside rows of the distinct prompts.
Packed: all tokens end to end in one row, without padding; a prompt may also occur once for all its responses. The last scored token
of a response is never fed to the model, since no token after it is predicted.
Legend: N samples, B rows of a micro-batch that hold a scored token, G distinct prompts, L padded length, P padded prompt length, F
fed tokens of a pack, S sequences of a pack, R scored tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import MediaRef, OutputSpec
from dovetail_torch_engines import Scored, distinct, read_at


@attrs.frozen(kw_only=True, eq=False)
class Images:
    """Images of the rows of a padded micro-batch."""

    media_B: tuple[tuple[MediaRef, ...], ...]
    """References to each row's images, in the order of their tokens."""
    shown_BL: np.ndarray
    """bool [B, L]: whether a token may stand for an image: in prompts of rows with images, and in responses at image tokens."""


@attrs.frozen(kw_only=True, eq=False)
class Padded:
    """Layout in which a row is a prompt and its response, padded on the right."""

    ids_BL: np.ndarray
    """int64 [B, L], token ids; padded with 0 on the right, to which causal attention never attends."""
    images: Images | None = None
    """The images of the rows; None if no row has images."""

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included: B · L."""
        return self.ids_BL.size


@attrs.frozen(kw_only=True, eq=False)
class Shared:
    """Layout that computes each distinct prompt once; a row is a response, which attends to its prompt's keys and values."""

    prompts_GP: np.ndarray
    """int64 [G, P], token ids of the distinct prompts, right-padded with 0."""
    ids_BL: np.ndarray
    """int64 [B, L], token ids of the responses, right-padded with 0."""
    prompt_of_B: np.ndarray
    """int64 [B]: index of the prompt that each row answers."""
    prompt_lengths_B: np.ndarray
    """int64 [B]: number of tokens of each row's prompt."""

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included: G · P + B · L."""
        return self.prompts_GP.size + self.ids_BL.size


@attrs.frozen(kw_only=True, eq=False)
class PackedSequences:
    """Layout of S sequences end to end, without padding; tokens attend within their own sequence."""

    ids_F: np.ndarray
    """int64 [F], token ids of all sequences."""
    positions_F: np.ndarray
    """int64 [F], position of each token, counted from the start of the token's own sample."""
    lengths_S: np.ndarray
    """int64 [S], lengths of the sequences, all ≥ 1."""
    responses_G: np.ndarray | None = None
    """int64 [G], number of response tokens that attend to each prompt, if prompts are computed once: the first G sequences are then
    prompts, and the responses follow in the order of their prompts. None: a sequence is a sample."""

    @property
    def tokens(self) -> int:
        """The number of tokens, F."""
        return len(self.ids_F)


@attrs.frozen(kw_only=True, eq=False)
class MicroBatchLayout:
    """One micro-batch as model input, and the positions of its scores."""

    fed: Padded | Shared | PackedSequences
    """The model's input. Rows without a scored token are left out."""
    source_R: np.ndarray
    """int64 [R]: index of the hidden state that predicts each scored token, in the flattened [B, L] (padded), in the flattened [G,
    P] followed by the flattened [B, L] (shared), or in [F] (packed)."""
    targets_R: np.ndarray
    """int64 [R]: ids of the scored tokens."""
    temperature_R: np.ndarray | None
    """float32 [R]: temperature of each scored token; None if all are 1."""
    token_R: np.ndarray
    """int64 [R]: positions of the scored tokens among the micro-batch's T response tokens."""
    tokens: int
    """Number of response tokens T, masked tokens and rows without a scored token included."""
    padding: int = 0
    """Number of padding tokens in the model's input, `fed`."""
    read: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    """Values of the columns that the outputs read, at the R scored tokens: [R, …] by column name, integers as int64."""


DUMMY = MicroBatchLayout(
    fed=Padded(ids_BL=np.zeros((1, 1), np.int64)),
    source_R=np.zeros(1, np.int64),
    targets_R=np.zeros(1, np.int64),
    temperature_R=None,
    token_R=np.zeros(1, np.int64),
    tokens=1,
)
"""A layout of one token, for a rank that must run the model without tokens to score."""


def lay_out(
    micro_batch: Batch,
    outputs: Iterable[OutputSpec] = (),
    *,
    shared: bool = False,
    packed: bool = False,
) -> MicroBatchLayout:
    """Convert a micro-batch to a model's input, and locate the hidden state that predicts each scored token.

    Args:
        micro_batch: the samples, with the columns in `dovetail.interfaces.READS`; samples with images also need `media`, and
            `image_mask` if responses have images (padded layouts only).
        outputs: the outputs to compute; the layout includes the columns that these outputs read.
        shared: whether to compute each distinct prompt once.
        packed: whether to put all tokens into one row, without padding.
    """
    mask, responses = micro_batch["response_mask"], micro_batch["response_ids"]
    scored = Scored.of(mask)
    samples = _Samples(micro_batch, scored)
    row_R, token_R = scored.row_R, scored.token_R
    make = (_shared_pack if shared else _pack) if packed else (_shared if shared else _padded)
    fed, source_R = make(samples, row_R, scored.step_R)
    temperature_N = micro_batch["temperature"].astype(np.float32)
    return MicroBatchLayout(
        fed=fed,
        source_R=source_R.astype(np.int64),
        targets_R=responses.values[token_R].astype(np.int64),
        temperature_R=None if np.all(temperature_N == 1) else temperature_N[scored.active_B][row_R],
        token_R=token_R,
        tokens=len(mask.values),
        padding=fed.tokens - samples.tokens(shared=shared),
        read=read_at(micro_batch, token_R, outputs),
    )


class _Samples:
    """The rows of a micro-batch that hold a scored token."""

    def __init__(self, micro_batch: Batch, scored: Scored) -> None:
        active, scored_B = scored.active_B, scored.lengths_B
        prompts, responses = micro_batch["prompt_ids"], micro_batch["response_ids"]
        self.prompts = [prompts[i] for i in active]
        self.prompt_lengths_B = prompts.lengths[active]
        self.response_lengths_B = scored_B - 1
        self.prompt_B = distinct(prompts)[active]
        self.media_B: tuple[tuple[MediaRef, ...], ...] = ()
        self._stands: list[np.ndarray] = []
        if "media" in micro_batch:
            media = micro_batch["media"]
            self.media_B = tuple(tuple(map(MediaRef.from_json, media[i])) for i in active)
        if "image_mask" in micro_batch:
            mask = micro_batch["image_mask"]
            self._stands = [mask[i] for i in active]
            # Images are fed as a whole, even if the last one follows the last scored token.
            ends_B = np.array(
                [np.flatnonzero(row)[-1] + 1 if row.any() else 0 for row in self._stands], np.int64
            )
            self.response_lengths_B = np.maximum(self.response_lengths_B, ends_B)
        self.responses = [
            responses[i][:n] for i, n in zip(active, self.response_lengths_B, strict=True)
        ]
        """The response tokens of each row that are fed to the model."""

    def tokens(self, *, shared: bool) -> int:
        """Return the number of tokens to feed; if prompts are shared, each distinct prompt counts once."""
        prompts_B = self.prompt_lengths_B
        if shared:
            prompts_B = prompts_B[np.unique(self.prompt_B, return_index=True)[1]]
        return int(prompts_B.sum() + self.response_lengths_B.sum())

    def whole(self) -> list[np.ndarray]:
        """Return prompt and response of each row, concatenated."""
        pairs = zip(self.prompts, self.responses, strict=True)
        return [np.concatenate(pair) for pair in pairs]

    def images(self, length: int) -> Images | None:
        """Return the images of the rows, for rows padded to `length`; None if no row has images."""
        if not any(self.media_B):
            return None
        shown_BL = np.zeros((len(self.media_B), length), np.bool_)
        for row, (media, prompt) in enumerate(
            zip(self.media_B, self.prompt_lengths_B, strict=True)
        ):
            shown_BL[row, :prompt] = bool(media)
            if media and self._stands:
                stands_T = self._stands[row][: self.response_lengths_B[row]]
                shown_BL[row, prompt : prompt + len(stands_T)] = stands_T
        return Images(media_B=self.media_B, shown_BL=shown_BL)


def _padded(samples: _Samples, row_R: np.ndarray, step_R: np.ndarray) -> tuple[Padded, np.ndarray]:
    ids_BL = _right_padded(samples.whole())
    source_R = row_R * ids_BL.shape[1] + samples.prompt_lengths_B[row_R] - 1 + step_R
    return Padded(ids_BL=ids_BL, images=samples.images(ids_BL.shape[1])), source_R


def _shared(samples: _Samples, row_R: np.ndarray, step_R: np.ndarray) -> tuple[Shared, np.ndarray]:
    _, first_G, prompt_of_B = np.unique(samples.prompt_B, return_index=True, return_inverse=True)
    prompts_GP = _right_padded([samples.prompts[i] for i in first_G])
    ids_BL = _right_padded(samples.responses)
    lengths_B = samples.prompt_lengths_B
    at_prompt_R = prompt_of_B[row_R] * prompts_GP.shape[1] + lengths_B[row_R] - 1
    at_response_R = prompts_GP.size + row_R * ids_BL.shape[1] + step_R - 1
    fed = Shared(
        prompts_GP=prompts_GP,
        ids_BL=ids_BL,
        prompt_of_B=prompt_of_B.astype(np.int64),
        prompt_lengths_B=lengths_B,
    )
    return fed, np.where(step_R == 0, at_prompt_R, at_response_R)


def _pack(
    samples: _Samples, row_R: np.ndarray, step_R: np.ndarray
) -> tuple[PackedSequences, np.ndarray]:
    rows = samples.whole()
    lengths_B = samples.prompt_lengths_B + samples.response_lengths_B
    starts_B = np.cumsum(lengths_B) - lengths_B
    fed = PackedSequences(
        ids_F=_end_to_end(rows),
        positions_F=_end_to_end(np.arange(n) for n in lengths_B),
        lengths_S=lengths_B,
    )
    return fed, starts_B[row_R] + samples.prompt_lengths_B[row_R] - 1 + step_R


def _shared_pack(
    samples: _Samples, row_R: np.ndarray, step_R: np.ndarray
) -> tuple[PackedSequences, np.ndarray]:
    _, first_G, prompt_of_B = np.unique(samples.prompt_B, return_index=True, return_inverse=True)
    prompt_lengths_G = samples.prompt_lengths_B[first_G]
    prompt_ends_G = np.cumsum(prompt_lengths_G)
    order_B = np.argsort(prompt_of_B, kind="stable")
    lengths_B = samples.response_lengths_B
    starts_B = np.empty_like(lengths_B)
    starts_B[order_B] = prompt_lengths_G.sum() + np.cumsum(lengths_B[order_B]) - lengths_B[order_B]
    responses = [samples.responses[i] for i in order_B]
    begins_B = samples.prompt_lengths_B[order_B]
    positions = [np.arange(n) for n in prompt_lengths_G]
    positions += [b + np.arange(n) for b, n in zip(begins_B, lengths_B[order_B], strict=True)]
    lengths_S = np.concatenate([prompt_lengths_G, lengths_B[order_B]])
    fed = PackedSequences(
        ids_F=_end_to_end([*(samples.prompts[i] for i in first_G), *responses]),
        positions_F=_end_to_end(positions),
        lengths_S=lengths_S[lengths_S > 0],
        responses_G=np.bincount(prompt_of_B, lengths_B, len(first_G)).astype(np.int64),
    )
    at_prompt_R = prompt_ends_G[prompt_of_B[row_R]] - 1
    return fed, np.where(step_R == 0, at_prompt_R, starts_B[row_R] + step_R - 1)


def _end_to_end(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate rows, int64 [F]."""
    return np.concatenate([np.empty(0, np.int64), *rows])


def _right_padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows, padded with 0 on the right, int64 [B, L]."""
    lengths_B = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    longest = int(lengths_B.max(initial=0))
    ids_BL = np.zeros((len(rows), longest), np.int64)
    if rows:
        ids_BL[np.arange(longest) < lengths_B[:, None]] = np.concatenate(rows)
    return ids_BL
