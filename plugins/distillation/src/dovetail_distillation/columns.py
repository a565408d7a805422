"""The columns with a teacher's log-probabilities. Legend: T response tokens, K most likely words (vocabulary tokens) of the teacher."""

from __future__ import annotations

from dovetail.batch import Column

LOG_PROBS, TOP_IDS, TOP_LOG_PROBS = (
    "teacher_log_probs",
    "teacher_top_ids",
    "teacher_top_log_probs",
)

COLUMNS = (
    Column(
        LOG_PROBS,
        "float32",
        "ragged",
        "log-probability of each token by its teacher, full softmax",
        "score_teacher",
        "response_ids",
    ),
    Column(
        TOP_IDS,
        "int32",
        "ragged",
        "the teacher's most likely words, the likeliest first",
        "score_teacher",
        "response_ids",
        (None,),
    ),
    Column(
        TOP_LOG_PROBS,
        "float32",
        "ragged",
        "log-probabilities of these words by the teacher, full softmax",
        "score_teacher",
        "response_ids",
        (None,),
    ),
)
