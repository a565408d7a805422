"""Replicas that join and leave between the publications of a run."""

from __future__ import annotations


def test_replicas_join_and_leave_at_the_next_publication_also_where_no_weights_have_moved(
    compose,
) -> None:
    made = compose()
    with made.run.record.running():
        made.run.publish_weights()
        late = type(made.engine)()
        made.pool.replicas.add(lambda number: late, "http://127.0.0.1:8000")
        made.run.publish_weights()
        assert (late.version, made.engine.version) == (1, 1)
        assert made.pool.replicas.usable == (made.engine, late)
        made.pool.replicas.members[0].draining = True
        made.run.publish_weights()
        assert made.pool.replicas.usable == (late,)
        assert made.engine.closed
        made.step()
        assert (late.version, len(late.requests)) == (2, 2)
        made.run.publish_weights()
        assert late.versions == [1, 1, 2]
