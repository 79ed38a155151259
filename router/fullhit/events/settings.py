"""Every limit and every time of the event plane, each with its unit and the reason for its value.

All of these are bounds on trust. A publisher may be slow, mad or malicious, a network may lose what it likes;
what this package does about it costs at most what is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fullhit_publisher.wire import Limits

__all__ = ["IngestSettings", "StreamSettings"]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Rules of one worker's stream. Times in seconds."""

    silence_grace: float = 5.0
    """Without any message for this long (or ``silence_beats`` heartbeat intervals, whichever is longer) a
    worker is doubtful. Too low: a garbage collection in an encoder costs a snapshot. Too high: a dead
    publisher is believed for that long."""
    silence_beats: float = 5.0
    gone_after: float = 30.0
    """Silence after which the worker's entries leave the index (never shorter than ``silence_grace``)."""
    plane_grace: float = 5.0
    """How long entries are believed while the whole event plane is down."""

    request_delay: float = 0.05
    """Upper bound of the random wait before a snapshot request. Lets a reordered delta arrive, and keeps
    many routers from asking in the same millisecond."""
    verify_beats: float = 1.5
    """After a loss that a heartbeat may disprove (plane down, slow consumer) the request waits for this many
    heartbeat intervals."""
    request_timeout: float = 5.0
    """Longest wait for the first part, and between parts."""
    fill_timeout: float = 60.0
    """Longest time for one snapshot from request to last part."""
    backoff_base: float = 0.5
    backoff_max: float = 30.0
    """Wait before try n: half to all of ``base * 2**(n-1)``, at most ``backoff_max``. Also between two
    snapshots that both ended in a digest which differs, so that no disagreement becomes a loop."""
    gap_pause: float = 0.1
    gap_keys_per_second: float = 100_000.0
    """A network that loses messages all the time: least pause between two snapshots of a worker for that, and what they
    may cost. A cache of a million keys is asked every 10 s then, a small one at once. Too low: the worker stays
    doubtful, and its full hits are not used. Too high: 34 bytes a key on a network that is in trouble already."""

    max_buffered_deltas: int = 10_000
    max_buffered_keys: int = 500_000
    """Deltas kept while a hole or a snapshot is open; above either bound they are dropped and the snapshot
    starts anew. 500,000 keys take about 40 MB."""
    max_keys: int = 4_000_000
    """Keys one worker may claim; above it the worker is quarantined. 4 M keys of 100 bytes of index are
    400 MB, and no real embedding cache holds that many pictures."""
    max_parts: int = 10_000

    retired_epochs: int = 8
    """Past incarnations remembered, so that their late messages are known for what they are."""
    takeover_beats: float = 3.0
    """An incarnation with a *smaller* epoch (a clock set back) is believed once the present one has missed
    this many heartbeats."""
    suspect_limit: float = 15.0
    """An incarnation with a smaller epoch that is heard for this long beside the present one claims its id."""
    conflict_returns: int = 2
    """Times that publishers of one epoch may take turns within ``conflict_window`` before the worker id
    counts as claimed twice. One change of publisher is a restart; a return is not."""
    conflict_window: float = 30.0
    head_denials: int = 3
    """Heartbeats that agree with the entries and name a delta before the highest one heard of, after which that one
    counts as never published. A late heartbeat may do so once; without an end the worker would stay doubtful."""
    conflict_margin: float = 2.0
    """A message of a past incarnation sent this much after the present one began speaks for two living
    workers, not for a slow network."""
    quarantine: float = 60.0
    quarantine_max: float = 3600.0
    """First and longest quarantine; doubles each time."""
    doubt_ttl: float = 600.0
    """Publishers without snapshots: age at which doubtful entries leave the index."""
    silent_ttl: float = 3600.0
    """Publishers without heartbeats: silence after which their entries are doubtful, until the next delta in order.
    Too low: a warm cache, which publishes nothing, loses its hits. Too high: what was lost in silence is believed."""
    contradictions: int = 3
    """Publishers without heartbeats: promised full hits that were encoded after all, within ``doubt_ttl``, which make
    the worker doubtful. One or two may be evictions on the way, which the publisher merged with what came after."""


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """Bounds of the whole intake."""

    stream: StreamSettings = field(default_factory=StreamSettings)
    limits: Limits = field(default_factory=Limits)
    slice_keys: int = 250
    """Keys applied between two looks at the rest of the event loop. While the index grows, a few of its tables grow in
    one slice, which costs more than the keys; at 500 such slices come near a millisecond."""
    max_snapshots: int = 8
    """Snapshot requests outstanding over all workers."""
    max_lane_bytes: int = 64 * 1024 * 1024
    """Undigested messages kept per worker; above it they are dropped and the worker becomes doubtful."""
    max_backlog_bytes: int = 256 * 1024 * 1024
    """The same over all workers."""
    announce_interval: float = 5.0
    """An unknown worker's heartbeat is passed on once per this many seconds."""
    max_strangers: int = 10_000
    """Unknown workers remembered for that."""
    log_interval: float = 10.0
    """One line per cause and worker in this many seconds."""
