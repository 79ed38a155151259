"""Prometheus metrics: fixed names, bounded label values, cheap increments.

Three rules.

* **No double bookkeeping.** What the pools know (in-flight, readiness, keys) is read from them while scraping, so a
  gauge cannot drift from the truth and the series of a removed worker are gone with the worker.
* **Bounded cardinality.** A label value may come from the network (a worker id in an event, a cause built from a
  status). ``worker`` is kept only for workers of our pools, ``pool`` for configured pools, ``reason`` and ``code``
  from a fixed vocabulary, and every other label keeps at most ``MAX_VALUES`` distinct values per metric; the rest
  is ``other``.
* **Never the fault.** A name or label that does not exist is a programming error: ``strict`` (tests) raises, a
  running router counts it in ``fullhit_telemetry_errors_total`` and goes on.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import fullhit
from fullhit.core.types import Reason

if TYPE_CHECKING:
    from fullhit.core.pool import Pool

__all__ = ["CONTENT_TYPE", "COUNTERS", "Definition", "Metrics", "UnknownMetric"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
MAX_VALUES = 48
"""Distinct values kept per free label of one metric."""
MAX_CACHED = 8_192
"""Remembered (name, labels) pairs; far above what the label rules allow, it only bounds what garbage can add."""

_VALUE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_REASONS = frozenset(str(reason) for reason in Reason) | {"none"}


class UnknownMetric(LookupError):
    """A metric or label that is not defined here; raised in strict mode only."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One counter: its name without ``fullhit_`` and ``_total``, what it counts, its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


COUNTERS = (
    Definition("requests", "Requests answered, by pool, reason of the decision and status", ("pool", "reason", "code")),
    Definition("events", "Messages of the event plane applied", ("worker", "kind")),
    Definition("events_rejected", "Messages of the event plane refused", ("cause",)),
    Definition("event_gaps", "Holes found in a worker's sequence of events"),
    Definition("resyncs", "Snapshots asked for, by why and how it ended", ("cause", "outcome")),
    Definition("digest_mismatch", "Heartbeats whose digest differs from the index at equal sequence"),
    Definition("hit_mispredictions", "Full hits that the worker reported as misses, whole or in part"),
    Definition(
        "cache_reports",
        "Requests by what the worker was chosen for and what it says its cache had",
        ("worker", "predicted", "delivered"),
    ),
    Definition("retries", "Requests sent to another worker after the first could not take them", ("cause",)),
    Definition("bad_images", "Images that cannot be read, by what was done", ("action",)),
    Definition("registrations", "Receiver registrations of language servers, by outcome", ("outcome",)),
    Definition("rejected", "Requests refused before they reached a worker", ("cause",)),
    Definition("worker_failures", "Failures seen at workers by requests", ("worker", "kind")),
    Definition("probes", "Health probes by outcome", ("outcome",)),
    Definition("worker_changes", "Changes of a worker's state, by new state", ("state",)),
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)
_SELECT_SECONDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2.5e-4, 1e-3, 5e-3, 2.5e-2)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All metrics of one router, in a registry of their own.

    ``pools`` is the live mapping of the router's pools. Usage::

        metrics = Metrics(pools)
        metrics.count("retries", cause="connect")
        metrics.gauge("queue_depth", "Requests waiting for a worker", lambda: len(queue))
        text = metrics.render()
    """

    def __init__(self, pools: Mapping[str, Pool], *, strict: bool = False) -> None:
        self._pools = pools
        self._strict = strict
        self.registry = CollectorRegistry(auto_describe=False)
        self._definitions = {definition.name: definition for definition in COUNTERS}
        self._counters = {
            d.name: Counter(f"fullhit_{d.name}", d.help, d.labels, registry=self.registry) for d in COUNTERS
        }
        self._children: dict[tuple[str, tuple[tuple[str, object], ...]], Counter] = {}
        self._values: dict[tuple[str, str], set[str]] = {}
        self._requests: dict[tuple[str, str, int], Counter] = {}
        self._errors = Counter(
            "fullhit_telemetry_errors", "Uses of a metric or label that does not exist", registry=self.registry
        )
        # A metric without labels exists from the start; give the others their first child so that rates see zero.
        self.request_seconds = Durations(
            "fullhit_request_seconds", "From the head of a request to the end of its answer", _SECONDS
        )
        self.select_seconds = Durations("fullhit_select_seconds", "Time to choose a worker", _SELECT_SECONDS)
        self.event_lag_seconds = Histogram(
            "fullhit_event_lag_seconds",
            "From publishing to applying, by the two clocks",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._totals: dict[str, tuple[str, Callable[[], float]]] = {}
        self.registry.register(self.request_seconds)
        self.registry.register(self.select_seconds)
        self.registry.register(_Live(pools, self._gauges, self._totals))
        ProcessCollector(registry=self.registry)

    def count(self, name: str, amount: float = 1, /, **labels: object) -> None:
        """Add to a counter. ``name`` with or without ``fullhit_`` and ``_total``; raises only in strict mode."""
        key = (name, tuple(labels.items()))
        child = self._children.get(key)
        if child is None:
            child = self._resolve(name, labels)
            if child is None:
                return
            if len(self._children) >= MAX_CACHED:
                self._children.clear()
            self._children[key] = child
        child.inc(amount)

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None:
        """One request was answered with ``code`` after ``seconds``; ``reason`` ``none`` when nothing was decided."""
        key = (pool, reason, code)
        child = self._requests.get(key)
        if child is None:
            if len(self._requests) >= MAX_CACHED:
                self._requests.clear()
            labels = self._bounded("requests", {"pool": pool, "reason": reason, "code": code})
            child = self._requests[key] = self._counters["requests"].labels(**labels)
        child.inc()
        self.request_seconds.observe(pool if pool in self._pools else OTHER, seconds)

    def observe_select(self, pool: str, seconds: float) -> None:
        """A choice in ``pool`` took ``seconds``."""
        self.select_seconds.observe(pool if pool in self._pools else OTHER, seconds)

    def observe_lag(self, seconds: float) -> None:
        """A message was applied ``seconds`` after it was published; clock skew below zero counts as zero."""
        self.event_lag_seconds.observe(max(0.0, seconds))

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Register ``fullhit_<name>``, read at scrape time."""
        self._gauges["fullhit_" + name] = (help, read)

    def total(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Register the counter ``fullhit_<name>_total`` whose value somebody else keeps."""
        self._totals["fullhit_" + name] = (help, read)

    def forget_worker(self, worker: str) -> None:
        """Drop the series of a worker that is gone."""
        for definition in COUNTERS:
            if "worker" in definition.labels:
                counter, position = self._counters[definition.name], definition.labels.index("worker")
                for values in [v for v in counter._metrics if v[position] == worker]:
                    counter.remove(*values)
        self._children = {k: c for k, c in self._children.items() if ("worker", worker) not in k[1]}

    def render(self) -> bytes:
        """The exposition text, of type ``CONTENT_TYPE``."""
        return generate_latest(self.registry)

    def _resolve(self, name: str, labels: Mapping[str, object]) -> Counter | None:
        definition = self._definitions.get(name.removeprefix("fullhit_").removesuffix("_total"))
        if definition is None:
            self._misuse(f"no metric is named {name!r}")
            return None
        if set(labels) != set(definition.labels):
            self._misuse(f"{name} has the labels {definition.labels}, not {tuple(labels)}")
        counter = self._counters[definition.name]
        if not definition.labels:
            return counter
        wanted = {label: labels.get(label, OTHER) for label in definition.labels}
        return counter.labels(**self._bounded(definition.name, wanted))

    def _misuse(self, message: str) -> None:
        if self._strict:
            raise UnknownMetric(message)
        self._errors.inc()

    def _bounded(self, metric: str, labels: Mapping[str, object]) -> dict[str, str]:
        return {label: self._bound(metric, label, str(value)) for label, value in labels.items()}

    def _bound(self, metric: str, label: str, value: str) -> str:
        match label:
            case "worker":
                return value if any(pool.get(value) is not None for pool in self._pools.values()) else OTHER
            case "pool":
                return value if value in self._pools else OTHER
            case "reason":
                return value if value in _REASONS else OTHER
            case "code":
                return value if len(value) == 3 and value.isascii() and value.isdigit() else OTHER
        seen = self._values.setdefault((metric, label), set())
        if value not in seen:
            if len(seen) >= MAX_VALUES or not _VALUE.fullmatch(value):
                return OTHER
            seen.add(value)
        return value


class Durations(Collector):
    """A histogram by pool whose `observe` is a bisection and two additions: it is called twice for each request, where
    `prometheus_client.Histogram` with its locks took as long as choosing a worker. Fed from one thread."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, pool: str, seconds: float) -> None:
        """Count one duration. ``pool`` has been bounded by the caller."""
        counts = self._counts.get(pool)
        if counts is None:
            counts = self._counts[pool] = [0] * (len(self._bounds) + 1)
            self._sums[pool] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[pool] += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["pool"])
        limits = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for pool, counts in self._counts.items():
            buckets = list(zip(limits, itertools.accumulate(map(float, counts)), strict=True))
            family.add_metric([pool], buckets, self._sums[pool])
        yield family


class _Live(Collector):
    """Reads pools and registered callables while a scrape is being answered."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        gauges: Mapping[str, tuple[str, Callable[[], float]]],
        totals: Mapping[str, tuple[str, Callable[[], float]]],
    ) -> None:
        self._pools = pools
        self._gauges = gauges
        self._totals = totals

    def _pool_counters(self) -> Metric:
        family = CounterMetricFamily(
            "fullhit_pool_refusals",
            "What a pool did not take: keys over a cap, unknown workers",
            labels=["pool", "kind"],
        )
        for name, pool in self._pools.items():
            for kind, number in pool.counters.items():
                family.add_metric([name, kind], number)
        return family

    def _blind(self) -> Metric:
        family = CounterMetricFamily(
            "fullhit_blind_decisions",
            "Decisions without a full hit while what some worker holds was in doubt",
            labels=["pool"],
        )
        for name, pool in self._pools.items():
            family.add_metric([name], pool.blind)
        return family

    def collect(self) -> Iterator[Metric]:
        inflight: dict[str, float] = {}
        encoding: dict[str, float] = {}
        ready: dict[str, float] = {}
        entries: dict[str, float] = {}
        keys: dict[str, float] = {}
        for name, pool in self._pools.items():
            keys[name] = pool.index_keys
            for worker in pool.workers():
                # A worker that sits in two pools is one series: two would make the whole scrape invalid.
                inflight[worker.id] = inflight.get(worker.id, 0) + worker.inflight
                encoding[worker.id] = encoding.get(worker.id, 0) + worker.encoding
                entries[worker.id] = entries.get(worker.id, 0) + worker.key_count
                ready[worker.id] = max(ready.get(worker.id, 0), worker.ready and not worker.draining)
        yield _family("fullhit_worker_inflight", "Requests sent and not finished", "worker", inflight)
        yield _family("fullhit_worker_encoding", "Of those, the ones that really encode", "worker", encoding)
        yield _family("fullhit_worker_up", "1 when the worker gets traffic", "worker", ready)
        yield _family("fullhit_index_keys", "Distinct keys in the index", "pool", keys)
        yield self._pool_counters()
        yield self._blind()
        yield _family("fullhit_index_entries", "Keys the worker is believed to hold", "worker", entries)
        yield from _read(self._gauges, GaugeMetricFamily)
        yield from _read(self._totals, CounterMetricFamily)
        yield InfoMetricFamily("fullhit_build", "Version of the router", value={"version": fullhit.__version__})


def _family(name: str, help: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _read(
    sources: Mapping[str, tuple[str, Callable[[], float]]],
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
) -> Iterable[Metric]:
    for name, (help, read) in sources.items():
        try:
            value = float(read())
        except Exception:
            continue  # one broken source must not cost the whole scrape
        yield family(name, help, value=value)
