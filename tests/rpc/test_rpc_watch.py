"""What watchers are told, without sockets: the shared look and each watcher's news."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fullhit.decision import WorkerFeed, WorkerRow, WorkerWatch


def row(id: str, pool: str = "p", state: str = "ready", keys: int = 0) -> WorkerRow:
    return WorkerRow(
        id, 1, id, pool, "cuda", "gpu", 1.0, None, state, "static", (), False, True, False, True, keys, 0, 0
    )  # fmt: skip


class Hall:
    """Workers to look at, and how often somebody looked."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0
        self.rows: dict[str, WorkerRow] = {}
        self.feed = WorkerFeed(self.look, lambda: self.now, max_age=0.1)

    def look(self) -> list[WorkerRow]:
        self.looks += 1
        return list(self.rows.values())


def test_many_watchers_share_one_look():
    hall = Hall()
    hall.rows = {"a": row("a")}
    watches = [WorkerWatch(hall.feed) for _ in range(100)]
    assert all(len(watch.news().changed) == 1 for watch in watches) and hall.looks == 1
    hall.now = 0.2
    assert all(watch.news() == ([], []) for watch in watches) and hall.looks == 2
    hall.rows["b"] = row("b")
    assert watches[0].news() == ([], []), "the last look will do"
    hall.feed.touch()
    assert [r.id for r in watches[0].news().changed] == ["b"]
    assert hall.looks == 3


def test_figures_alone_are_no_news_but_come_along():
    hall = Hall()
    hall.rows = {"a": row("a")}
    watch = WorkerWatch(hall.feed)
    watch.news()
    hall.now += 1
    hall.rows["a"] = row("a", keys=5)
    assert watch.news() == ([], [])
    hall.now += 1
    hall.rows["a"] = row("a", keys=7, state="draining")
    assert [(r.state, r.keys) for r in watch.news().changed] == [("draining", 7)]


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_watcher_that_applies_its_news_knows_the_workers(seed, steps):
    """Whatever happens between two looks, and however seldom a watcher asks."""
    rng, hall = random.Random(seed), Hall()
    watches = [(pool, WorkerWatch(hall.feed, pool), {}) for pool in ("", "p", "q")]
    for _ in range(steps):
        for _ in range(rng.randrange(4)):
            id = rng.choice("abcd")
            if rng.random() < 0.3:
                hall.rows.pop(id, None)
            else:
                hall.rows[id] = row(id, rng.choice("pq"), rng.choice(["ready", "down"]))
        hall.now += 1
        for pool, watch, known in watches:
            if rng.random() < 0.6:
                news = watch.news()
                for gone in news.gone:
                    del known[gone.pool, gone.id]
                for changed in news.changed:
                    known[changed.pool, changed.id] = changed
                assert known == {(r.pool, r.id): r for r in hall.rows.values() if pool in ("", r.pool)}
