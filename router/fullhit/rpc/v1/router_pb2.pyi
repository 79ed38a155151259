from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_FULL_HIT: _ClassVar[Reason]
    REASON_PARTIAL_HIT: _ClassVar[Reason]
    REASON_MISS: _ClassVar[Reason]
    REASON_NO_MEDIA: _ClassVar[Reason]
    REASON_PREDICTED: _ClassVar[Reason]
    REASON_PENDING: _ClassVar[Reason]
REASON_UNSPECIFIED: Reason
REASON_FULL_HIT: Reason
REASON_PARTIAL_HIT: Reason
REASON_MISS: Reason
REASON_NO_MEDIA: Reason
REASON_PREDICTED: Reason
REASON_PENDING: Reason

class MediaItem(_message.Message):
    __slots__ = ("url", "content_hash", "uuid", "options_json")
    URL_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    url: str
    content_hash: str
    uuid: str
    options_json: str
    def __init__(self, url: _Optional[str] = ..., content_hash: _Optional[str] = ..., uuid: _Optional[str] = ..., options_json: _Optional[str] = ...) -> None: ...

class SelectRequest(_message.Message):
    __slots__ = ("pool", "keys", "items", "sglang_encode", "openai_chat", "modality", "exclude", "request_id", "lease_seconds", "dry_run", "candidates", "session")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SGLANG_ENCODE_FIELD_NUMBER: _ClassVar[int]
    OPENAI_CHAT_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    items: _containers.RepeatedCompositeFieldContainer[MediaItem]
    sglang_encode: bytes
    openai_chat: bytes
    modality: str
    exclude: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    lease_seconds: float
    dry_run: bool
    candidates: int
    session: str
    def __init__(self, pool: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., items: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., sglang_encode: _Optional[bytes] = ..., openai_chat: _Optional[bytes] = ..., modality: _Optional[str] = ..., exclude: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., dry_run: _Optional[bool] = ..., candidates: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class SelectReply(_message.Message):
    __slots__ = ("worker", "reason", "decision_id", "pool", "lease_id", "lease_seconds", "repeated_call", "candidates", "keys", "unkeyed", "request_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_CALL_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    UNKEYED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    reason: Reason
    decision_id: int
    pool: str
    lease_id: str
    lease_seconds: float
    repeated_call: bool
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    keys: int
    unkeyed: int
    request_id: str
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., reason: _Optional[_Union[Reason, str]] = ..., decision_id: _Optional[int] = ..., pool: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., repeated_call: _Optional[bool] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., keys: _Optional[int] = ..., unkeyed: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "id", "url", "device")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    id: str
    url: str
    device: str
    def __init__(self, worker_id: _Optional[int] = ..., id: _Optional[str] = ..., url: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("id", "device_class", "inflight", "keys_held", "doubtful", "predicted", "chosen")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    KEYS_HELD_FIELD_NUMBER: _ClassVar[int]
    DOUBTFUL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    device_class: str
    inflight: int
    keys_held: int
    doubtful: bool
    predicted: bool
    chosen: bool
    def __init__(self, id: _Optional[str] = ..., device_class: _Optional[str] = ..., inflight: _Optional[int] = ..., keys_held: _Optional[int] = ..., doubtful: _Optional[bool] = ..., predicted: _Optional[bool] = ..., chosen: _Optional[bool] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "request_id", "pool")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    request_id: str
    pool: str
    def __init__(self, lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released", "worker", "decision_id")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    released: bool
    worker: str
    decision_id: int
    def __init__(self, released: _Optional[bool] = ..., worker: _Optional[str] = ..., decision_id: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("call", "select", "release")
    CALL_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    call: int
    select: SelectRequest
    release: ReleaseRequest
    def __init__(self, call: _Optional[int] = ..., select: _Optional[_Union[SelectRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("call", "selected", "released", "refusal")
    CALL_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    call: int
    selected: SelectReply
    released: ReleaseReply
    refusal: Refusal
    def __init__(self, call: _Optional[int] = ..., selected: _Optional[_Union[SelectReply, _Mapping]] = ..., released: _Optional[_Union[ReleaseReply, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("decision_id", "request_id", "pool")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    decision_id: int
    request_id: str
    pool: str
    def __init__(self, decision_id: _Optional[int] = ..., request_id: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("decision_id", "pool", "request_id", "worker", "reason", "policy", "why", "keys", "candidates", "record_json")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    decision_id: int
    pool: str
    request_id: str
    worker: str
    reason: Reason
    policy: str
    why: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    record_json: str
    def __init__(self, decision_id: _Optional[int] = ..., pool: _Optional[str] = ..., request_id: _Optional[str] = ..., worker: _Optional[str] = ..., reason: _Optional[_Union[Reason, str]] = ..., policy: _Optional[str] = ..., why: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., record_json: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class ListWorkersReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "url", "pool", "device", "device_class", "weight", "max_inflight", "state", "source", "labels", "usable", "doubtful", "publishing", "keys", "inflight_requests", "encoding_requests", "id", "draining")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    DOUBTFUL_FIELD_NUMBER: _ClassVar[int]
    PUBLISHING_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    url: str
    pool: str
    device: str
    device_class: str
    weight: float
    max_inflight: int
    state: str
    source: str
    labels: _containers.ScalarMap[str, str]
    usable: bool
    doubtful: bool
    publishing: bool
    keys: int
    inflight_requests: int
    encoding_requests: int
    id: str
    draining: bool
    def __init__(self, worker_id: _Optional[int] = ..., url: _Optional[str] = ..., pool: _Optional[str] = ..., device: _Optional[str] = ..., device_class: _Optional[str] = ..., weight: _Optional[float] = ..., max_inflight: _Optional[int] = ..., state: _Optional[str] = ..., source: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., usable: _Optional[bool] = ..., doubtful: _Optional[bool] = ..., publishing: _Optional[bool] = ..., keys: _Optional[int] = ..., inflight_requests: _Optional[int] = ..., encoding_requests: _Optional[int] = ..., id: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class WorkersChange(_message.Message):
    __slots__ = ("initial", "changed", "gone")
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    initial: bool
    changed: _containers.RepeatedCompositeFieldContainer[Worker]
    gone: _containers.RepeatedCompositeFieldContainer[WorkerGone]
    def __init__(self, initial: _Optional[bool] = ..., changed: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[WorkerGone, _Mapping]]] = ...) -> None: ...

class WorkerGone(_message.Message):
    __slots__ = ("worker_id", "id", "pool")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    id: str
    pool: str
    def __init__(self, worker_id: _Optional[int] = ..., id: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "delta", "snapshot")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    delta: Delta
    snapshot: SnapshotPart
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotPart, _Mapping]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("welcome", "snapshot_request")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    snapshot_request: SnapshotRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., snapshot_request: _Optional[_Union[SnapshotRequest, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("url", "pool", "device", "weight", "max_inflight", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    URL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    url: str
    pool: str
    device: str
    weight: float
    max_inflight: int
    labels: _containers.ScalarMap[str, str]
    def __init__(self, url: _Optional[str] = ..., pool: _Optional[str] = ..., device: _Optional[str] = ..., weight: _Optional[float] = ..., max_inflight: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "pool")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    pool: str
    def __init__(self, worker_id: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "seq", "keys", "digest", "capacity_bytes", "used_bytes", "inflight", "interval_ms", "hits", "misses")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    keys: int
    digest: int
    capacity_bytes: int
    used_bytes: int
    inflight: int
    interval_ms: int
    hits: int
    misses: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., keys: _Optional[int] = ..., digest: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., inflight: _Optional[int] = ..., interval_ms: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("epoch", "seq", "added_keys", "removed_keys", "resync")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ADDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    added_keys: _containers.RepeatedScalarFieldContainer[str]
    removed_keys: _containers.RepeatedScalarFieldContainer[str]
    resync: bool
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., added_keys: _Optional[_Iterable[str]] = ..., removed_keys: _Optional[_Iterable[str]] = ..., resync: _Optional[bool] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("request_id", "epoch", "seq", "part", "parts", "keys")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    epoch: int
    seq: int
    part: int
    parts: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[int] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...
