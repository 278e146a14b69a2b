"""Made by csrc/native_stub.py from the declarations in csrc/*.cdef.h: change those and run it."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, Self, TypeVar, overload

from typing_extensions import Buffer

_T = TypeVar("_T")
_C = TypeVar("_C", bound=CData)

class CData:
    """A C value: a struct, an array, a pointer."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...
    def __int__(self) -> int: ...

class Struct(CData):
    def __getitem__(self, index: int) -> Self: ...
    def __add__(self, number: int) -> Self: ...
    def __len__(self) -> int: ...

class Array(CData, Generic[_T]):
    """An array, or a pointer to its first element."""

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice[int, int, None]) -> Array[_T]: ...
    @overload
    def __setitem__(self, index: int, value: _T) -> None: ...
    @overload
    def __setitem__(self, index: slice[int, int, None], value: object) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[_T]: ...
    def __add__(self, number: int) -> Array[_T]: ...
    def __sub__(self, number: int) -> Array[_T]: ...

class CBuffer(Buffer):
    """The memory of a C value, as ffi.buffer() gives it."""

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> bytes: ...
    def __setitem__(self, index: int | slice, value: Buffer) -> None: ...
    def __len__(self) -> int: ...

class ms_affinity(Struct):
    is_enabled: int
    cpu: int
    until_ns: int
    is_bound: int
    reserved: int
    allowed: Array[int]

class ms_allocator_line(Struct):
    ready_end: int
    error_number: int
    error_count: int
    populated_end: int
    pad: Array[int]

class ms_blocked_reason(Struct):
    changes: int
    reserved: int
    text: Array[int]

class ms_blocked_reasons(Struct):
    magic: int
    layout_version: int
    reserved: int
    pad: Array[int]
    worker: Array[ms_blocked_reason]

class ms_cleaning(Struct):
    magic: int
    layout_version: int
    holds_max: int
    epoch: int
    pad0: Array[int]
    removing_end: int
    removing_since_ns: int
    removed_segments: int
    removed_queue_files: int
    removed_index_files: int
    removed_bytes: int
    waited_for_holds: int
    forced_holds: int
    rounds: int
    answered: int
    answer_segments: int
    answer_bytes: int
    answer_errno: int
    pad1: Array[int]
    probes: int
    usable_bytes: int
    used_percent: int
    queue_used_percent: int
    refusing: int
    reserved: int
    pad2: Array[int]
    reason: Array[int]
    asked: int
    asked_reserved_ms: int
    asked_used_percent: int
    pad3: Array[int]
    holds: Array[ms_hold]

class ms_column(Struct):
    kind: int
    is_bad: int
    name: ms_text
    texts: ms_text
    nulls: int
    bytes: int
    data: CData
    offsets: Array[int]
    validity: Array[int]

class ms_commit_slot(Struct):
    wrote: int
    store_timestamp_ms: int
    queue_table_generation: int
    sessions_high: int
    reserved: int
    put_messages: int
    put_bytes: int
    pad: Array[int]
    sessions: Array[ms_session_account]

class ms_completion(Struct):
    sequence: int
    physical_offset: int
    end_offset: int
    queue_offset: int
    store_timestamp_ms: int
    status: int
    detail: int
    count: int
    size_bytes: int
    reserved: int

class ms_control(Struct):
    identity: ms_identity
    state: ms_state
    min_offset: ms_position
    wrote: ms_position
    committed: ms_position
    flushed: ms_position
    reput_from: ms_position
    confirm: ms_position
    received: ms_position
    flush_seq: ms_sequence
    arrival_seq: ms_sequence
    session_seq: ms_sequence
    confirm_seq: ms_sequence
    settings_seq: ms_sequence
    writer: ms_writer_lines
    slot_pass: ms_position
    allocator: ms_allocator_line
    flusher: ms_flusher_lines
    replicator: ms_replicator_lines
    index_progress: Array[int]
    workers: Array[ms_worker]
    latch: Array[ms_latch]
    pool: Array[ms_pool_buffer]
    sessions: Array[ms_session_slot]
    slots: Array[ms_commit_slot]
    undo: ms_undo

class ms_dispatch(Struct):
    queues: ms_queue_set
    index: ms_index_file
    progress: ms_index_progress
    delays_ms: Array[int]
    delay_levels: int
    index_enabled: int
    multi_dispatch: int
    error_number: int
    indexed_offset: int
    indexed_keys: int
    reached: int
    wanted_topic: Array[int]
    wanted_topic_bytes: int
    wanted_queue_id: int
    wanted_queue_offset: int
    wanted_queue: int
    reserved: int
    last_store_timestamp_ms: int
    messages: int
    keys: int

class ms_dispatch_stats(Struct):
    batches: int
    messages: int
    entries: int
    keys: int
    out_of_order: int
    lag_max_bytes: int
    pad: Array[int]
    lag: ms_latency

class ms_entry(Struct):
    entry_bytes: int
    kind: int
    flags: int
    sequence: int
    born_timestamp_ms: int
    prepared_transaction_offset: int
    clock_ms: int
    queue_id: int
    flag: int
    sys_flag: int
    reconsume_times: int
    born_host: Array[int]
    store_host: Array[int]
    count: int
    topic_bytes: int
    properties_bytes: int
    payload_bytes: int
    submitted_ns: int
    reserved: int

class ms_ext_queue(Struct):
    end: int
    file_start: int
    allocated_bytes: int
    fd: int
    reserved: int

class ms_ext_run(Struct):
    first: int
    bytes: int
    units: Array[int]

class ms_ext_set(Struct):
    queues: ms_ext_queue
    runs: ms_ext_run
    file_bytes: int

class ms_failpoint(Struct):
    state: int
    signal: int
    nth: int
    hits: int
    pid: int
    spare: int
    process: Array[int]
    name: Array[int]

class ms_filter_queue(Struct):
    hash: int
    topic_at: int
    topic_bytes: int
    queue_id: int
    first_offset: int
    end_offset: int
    start_ms: int
    end_ms: int

class ms_flush_slot(Struct):
    flushed: int
    store_timestamp_ms: int

class ms_flusher_lines(Struct):
    slot_pass: int
    incarnation: int
    slot: Array[ms_flush_slot]
    syncs: int
    sync_ns_total: int
    sync_ns_max: int
    sync_target: int
    pad: Array[int]

class ms_group_commit(Struct):
    control: ms_control
    semaphore: CData
    writer_semaphore: CData
    segment_bytes: int
    has_published: int
    incarnation: int
    count: int
    error_number: int
    failed_base: int
    last_ns: int
    affinity: ms_affinity
    latency: ms_latency
    recorder: ms_recorder_handle
    sync_ns: int
    base: Array[int]
    fd: Array[int]

class ms_ha_follow(Struct):
    control: ms_control
    producer: ms_producer
    row: ms_link
    seal_in: ms_seal
    seal_out: ms_seal
    buffer: Array[int]
    buffer_bytes: int
    segment_bytes: int
    end: int
    acked: int
    got: int
    sequence: int
    fd: int
    acks_flushed: int
    has_received: int
    has_appended: int
    has_reported: int
    unsent_bytes: int
    report_bytes: int
    report: Array[int]
    header: ms_entry

class ms_ha_link(Struct):
    row: ms_link
    frame: Array[int]
    seal_out: ms_seal
    seal_in: ms_seal
    next: int
    start: int
    reported: int
    acked: int
    read_ns: int
    written_ns: int
    fd: int
    turn: int
    frame_bytes: int
    frame_sent: int
    has_input: int
    input_bytes: int
    input: Array[int]

class ms_ha_links(Struct):
    control: ms_control
    semaphore: CData
    reputter_semaphore: CData
    recorder: ms_recorder_handle
    segment_bytes: int
    batch_bytes: int
    segment_base: int
    all_sent: int
    now_ns: int
    segment_fd: int
    epoll_fd: int
    counts_one: int
    count: int
    ticket: int
    serving: int
    event_fd: Array[int]
    event_mask: Array[int]
    link: Array[ms_ha_link]

class ms_hold(Struct):
    owner: int
    segment: int
    pad: Array[int]

class ms_identity(Struct):
    magic: int
    layout_version: int
    control_bytes: int
    store_uuid: Array[int]
    boot_id: Array[int]
    epoch: int
    engine_id_device: int
    engine_id_inode: int
    segment_bytes: int
    session_ring_bytes_default: int
    max_message_bytes: int
    put_timeout_ms: int
    sync_flush_timeout_ms: int
    os_page_cache_busy_timeout_ms: int
    spin_writer_us: int
    spin_producer_us: int
    mode: int
    sessions_max: int
    pool_buffers: int
    replay_clock: int
    dispatch_at: int
    role: int
    created_ms: int
    sysv_semaphore_id: int
    gateway: int
    lock_modified_ns: int
    slave_timeout_ms: int
    ha_slave_fallbehind_max_bytes: int
    min_in_sync_replicas: int
    replicates: int
    created_boot_ns: int
    pad: Array[int]

class ms_index_file(Struct):
    base: Array[int]
    number: int
    slots: int
    entries: int
    is_written: int
    fd: int

class ms_index_header(Struct):
    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    hash_slot_count: int
    index_count: int

class ms_index_progress(Struct):
    putting: int
    file_number: int
    physical_offset: int
    slot: int
    old_head: int
    entry: int
    reserved: int
    old_header: Array[int]
    pad: Array[int]

class ms_latch(Struct):
    has_notified: int
    pad: Array[int]

class ms_latency(Struct):
    count: int
    sum_ns: int
    max_ns: int
    pad: Array[int]
    bucket: Array[int]

class ms_light_queues(Struct):
    enabled: int
    lmq: int
    lmq_max: int
    lmq_count: int
    count: int
    text_bytes: int
    table_slot: Array[int]
    text: Array[int]

class ms_link(Struct):
    state: int
    text_seq: int
    since_ms: int
    start: int
    sent: int
    acked: int
    acked_ms: int
    bytes: int
    frames: int
    caught_up_ns: int
    pad: Array[int]
    address: Array[int]
    detail: Array[int]

class ms_mover(Struct):
    next_ns: int
    pause_ns: int
    passes: int
    moves: int

class ms_pool_buffer(Struct):
    segment_base: int
    pad: Array[int]

class ms_pool_commit(Struct):
    control: ms_control
    semaphore: CData
    reputter_semaphore: CData
    replicator_semaphore: CData
    view: Array[int]
    base: int
    segment_bytes: int
    piece_bytes: int
    committed: int
    fd: int
    error_number: int
    reason: int
    reserved: int
    stream: ms_stream
    recorder: ms_recorder_handle

class ms_position(Struct):
    value: int
    pad: Array[int]

class ms_producer(Struct):
    control: ms_control
    session: ms_session
    writer_semaphore: CData
    ring: Array[int]
    ring_bytes: int
    tail: int
    sequence: int
    oldest_unread: int
    unclaimed: int
    engine_seen_ns: int
    lock_fd: int
    lock_byte: int
    engine_died: int
    finishing: int
    is_finished: Array[int]
    timeout_ns: int
    flush_timeout_ns: int
    slave_timeout_ns: int
    submitted_ns: int
    target_before: int
    reserved_bytes: int
    wall_ms: int
    wall_until_ns: int
    spin_us: int
    slot: int
    generation: int
    stage: int
    header: ms_entry
    answer: ms_completion

class ms_producer_calls(Struct):
    bytes: int
    completions: int
    reserve: CData
    publish: CData
    is_answered: CData
    wait_acked: CData
    stored_ns: CData
    wait_persisted: CData
    finish: CData
    is_closed: CData

class ms_put_meter(Struct):
    stats: ms_put_stats
    entries: int
    timed: int
    slow: int
    slow_ns: int
    slowest_ns: int
    submitted_ns: Array[int]

class ms_put_stats(Struct):
    entries: int
    passes: int
    entries_max: int
    unmeasured: int
    pad: Array[int]
    refused: Array[int]
    distribute: Array[int]
    size: Array[int]
    latency: ms_latency

class ms_queue(Struct):
    next_offset: int
    max_physical: int
    file_start: int
    allocated_bytes: int
    hash: int
    topic_at: int
    topic_bytes: int
    queue_id: int
    fd: int
    chunk: int
    last_used: int
    refused: int
    counted: ms_topic_count

class ms_queue_chunk(Struct):
    first: int
    count: int
    queue: int
    loaded: int
    dirty: int
    fresh: int
    fresh_bytes: int
    entries: Array[int]

class ms_queue_set(Struct):
    queues: ms_queue
    ext: ms_ext_set
    buckets: Array[int]
    topics: Array[int]
    chunks: ms_queue_chunk
    topic_stats: ms_topic_stats
    file_bytes: int
    topics_bytes: int
    topics_capacity: int
    count: int
    capacity: int
    bucket_mask: int
    chunk_count: int
    chunks_used: int
    tick: int
    failed_queue: int
    reserved: int
    written: int
    ignored: int
    out_of_order: int

class ms_queue_slot(Struct):
    next_offset: int
    hash: int
    queue_id: int
    key_bytes: int
    reserved: int
    topic: Array[int]

class ms_queue_table(Struct):
    magic: int
    generation: int
    slots: int
    used: int
    pad: Array[int]
    slot: Array[ms_queue_slot]

class ms_record(Struct):
    start: Array[int]
    body: Array[int]
    topic: Array[int]
    properties: Array[int]
    store_timestamp_ms: int
    size_bytes: int
    sys_flag: int
    born_host_bytes: int
    store_host_bytes: int
    body_bytes: int
    topic_bytes: int
    properties_bytes: int
    reserved: int

class ms_record_template(Struct):
    queue_offset: int
    physical_offset: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    prepared_transaction_offset: int
    queue_id: int
    flag: int
    sys_flag: int
    reconsume_times: int
    body_bytes: int
    topic_bytes: int
    properties_bytes: int
    reserved: int
    body: Array[int]
    topic: Array[int]
    properties: Array[int]
    born_host: Array[int]
    store_host: Array[int]

class ms_recorder(Struct):
    magic: int
    layout_version: int
    reserved: int
    recorder_bytes: int
    threshold_ns: int
    boot_id: Array[int]
    pad: Array[int]
    for_sync: ms_waiting
    pad1: Array[int]
    for_slave: ms_waiting
    pad2: Array[int]
    ring: Array[ms_recorder_ring]

class ms_recorder_handle(Struct):
    shared: ms_recorder
    ring: ms_recorder_ring
    threshold_ns: int
    attached_ns: int
    schedstat_fd: int
    pid: int
    epoch: int
    is_sync_master: int
    is_sync_mode: int
    last_cause: int
    last_began_ns: int
    last_ended_ns: int
    puts_noted_ns: int
    puts_held: ms_stall
    reserved: int
    continued: int
    window_began_ns: int
    checked_ns: int
    queued_ns: int
    busy_ns: int
    major_faults: int
    minor_faults: int
    preempted: int

class ms_recorder_ring(Struct):
    stalls: int
    stalled_ns: int
    phase_since_ns: int
    phase: int
    reserved: int
    pad: Array[int]
    by_cause: Array[int]
    longest: ms_stall
    minute: Array[ms_stall_minute]
    stall: Array[ms_stall]

class ms_replication(Struct):
    magic: int
    layout_version: int
    links_max: int
    epoch: int
    connections: int
    refused: int
    closed: int
    detail_ms: int
    text_seq: int
    reserved: int
    listening_port: int
    pad: Array[int]
    address: Array[int]
    detail: Array[int]
    links: Array[ms_link]

class ms_replicator_lines(Struct):
    slaves_connected: int
    linked: int
    master_end: int
    pad: Array[int]

class ms_reput(Struct):
    control: ms_control
    dispatch: ms_dispatch
    stats: ms_dispatch_stats
    limit: ms_position
    semaphore: CData
    allocator_semaphore: CData
    view: Array[int]
    base: int
    segment_bytes: int
    batch_bytes: int
    reput_from: int
    incomplete_end: int
    woken_up_to: int
    warmed_from: int
    lag_is_known: int
    has_backlog: int
    counted_messages: int
    counted_entries: int
    counted_keys: int
    counted_out_of_order: int
    stream: ms_stream

class ms_row_filter(Struct):
    queues: ms_filter_queue
    places: Array[int]
    topics: Array[int]
    tags: ms_text
    topics_bytes: int
    topics_capacity: int
    queue_count: int
    queue_capacity: int
    place_mask: int
    tag_count: int
    by_queue: int
    by_tag: int
    queued_only: int
    reserved: int
    start_ms: int
    end_ms: int

class ms_seal(Struct):
    key: Array[int]
    sequence: int

class ms_segment(Struct):
    base: int
    memory: Array[int]
    fd: int
    pool_buffer: int

class ms_selection(Struct):
    position: int
    passed: int
    rows: int
    unknown_topic: Array[int]
    unknown_topic_bytes: int
    unknown_queue_id: int
    passed_entries: int

class ms_send(Struct):
    sequence: int
    opaque: int
    queue_id: int
    frame_bytes: int
    topic: int

class ms_send_topic(Struct):
    topic_bytes: int
    queues: int
    topic: Array[int]

class ms_sends(Struct):
    head: ms_entry
    frame_bytes_max: int
    topic_count: int
    cluster_bytes: int
    cluster: Array[int]
    piece_bytes: Array[int]
    piece: Array[Array[int]]
    topics: Array[ms_send_topic]
    count: int
    answered: int
    answer_bytes: int
    reserved: int
    taken: Array[ms_send]
    answers: Array[int]
    text: Array[int]
    properties: Array[int]

class ms_sequence(Struct):
    value: int
    pad: Array[int]

class ms_session(Struct):
    magic: int
    layout_version: int
    slot: int
    generation: int
    completions: int
    epoch: int
    ring_bytes: int
    ring_at: int
    pad: Array[int]
    tail: int
    pad1: Array[int]
    waiting: int
    producer_cpu: int
    pad2: Array[int]
    head: int
    acked: int
    acked_seq: int
    closed: int
    pad3: Array[int]
    completion: Array[ms_completion]

class ms_session_account(Struct):
    head: int
    acked: int
    generation: int

class ms_session_slot(Struct):
    state: int
    generation: int
    pid: int
    uid: int
    start_time_ms: int
    ring_bytes: int
    bad_entry: int
    reserved: int
    pad: Array[int]

class ms_stall(Struct):
    number: int
    began_ns: int
    took_ns: int
    what: int
    cause: int
    phase_ns: Array[int]
    offset: int
    bytes: int
    window_ns: int
    queued_ns: int
    busy_ns: int
    entries: int
    detail: int
    major_faults: int
    minor_faults: int
    preempted: int
    continued: int
    error_number: int
    pid: int
    likely: int
    reserved: Array[int]
    epoch: int
    crc: int

class ms_stall_minute(Struct):
    minute: int
    stalls: int
    stalled_ns: int
    reserved: int
    longest: ms_stall

class ms_state(Struct):
    state: int
    retired: int
    frozen: int
    frozen_errno: int
    frozen_kind: int
    refuse_puts: int
    queue_table_generation_offered: int
    pad: Array[int]
    reason: Array[int]

class ms_stats_history(Struct):
    samples: int
    snapshots: int
    pad: Array[int]
    sample: Array[ms_stats_sample]
    snapshot: Array[ms_stats_snapshot]

class ms_stats_sample(Struct):
    at_ns: int
    put_messages: int
    put_bytes: int
    refused: int
    dispatched: int
    syncs: int
    reserved: Array[int]

class ms_stats_snapshot(Struct):
    at_ns: int
    pad: Array[int]
    put: Array[int]
    distribute: Array[int]
    sync: Array[int]
    lag: Array[int]

class ms_store_stats(Struct):
    magic: int
    layout_version: int
    stats_bytes: int
    pad: Array[int]
    put: ms_put_stats
    sync: ms_sync_stats
    dispatch: ms_dispatch_stats
    history: ms_stats_history

class ms_stream(Struct):
    gather_ns: int
    quiet_ns: int
    last_ns: int
    rounds: int
    is_busy: int

class ms_sync_stats(Struct):
    latency: ms_latency

class ms_tally(Struct):
    groups: ms_tally_group
    places: Array[int]
    group_capacity: int
    group_count: int
    place_mask: int
    by: int
    step_us: int

class ms_tally_group(Struct):
    hash: int
    numbers: Array[int]
    largest: int
    topic_bytes: int
    topic: Array[int]

class ms_text(Struct):
    at: Array[int]
    bytes: int

class ms_topic_count(Struct):
    messages: int
    bytes: int
    topic_bytes: int
    hash: int
    pad: Array[int]
    topic: Array[int]

class ms_topic_stats(Struct):
    magic: int
    layout_version: int
    slots: int
    used: int
    pad: Array[int]
    others: ms_topic_count
    slot: Array[ms_topic_count]

class ms_touched_queue(Struct):
    hash: int
    topic: Array[int]
    topic_bytes: int
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    count: int
    further: int
    newest: int

class ms_undo(Struct):
    count: int
    reserved: int
    pad: Array[int]
    old_offset: Array[int]
    table_slot: Array[int]

class ms_waiting(Struct):
    since_ns: int
    end: int

class ms_walk(Struct):
    end_offset: int
    messages: int
    first_store_timestamp_ms: int
    last_store_timestamp_ms: int
    reason: int
    reserved: int

class ms_worker(Struct):
    heartbeat_ns: int
    start_time_ms: int
    pid: int
    state: int
    cpu: int
    incarnation: int
    passes: int
    error_count: int
    position: int
    error_number: int
    settings_seq: int
    build_id: int
    pad: Array[int]
    restarts: int
    pad2: Array[int]

class ms_writer(Struct):
    control: ms_control
    queues: ms_queue_table
    semaphores: Array[CData]
    sessions: Array[ms_writer_session]
    sessions_high: int
    turn: int
    active: Array[int]
    scanned_ns: int
    touched_count: int
    touched_before_count: int
    touched: Array[int]
    touched_before: Array[int]
    whole_slots: int
    session_seq_seen: int
    mode: int
    segment_bytes: int
    max_message_bytes: int
    current: ms_segment
    ahead: Array[ms_segment]
    ahead_count: int
    segments_needed: int
    refuse_segment: int
    rolled: int
    finished: Array[ms_segment]
    gather_bytes_min: int
    is_gathering: int
    stage: Array[int]
    stage_bytes_max: int
    stage_bytes: int
    stage_from: int
    zeros: Array[int]
    zero_ahead_bytes: int
    zeroed_end: int
    scratch: Array[int]
    scratch_bytes: int
    side_slot: int
    side_bytes: int
    side_sequence: int
    side_loaded: int
    side_failed: int
    queues_refused: int
    position: int
    store_timestamp_ms: int
    put_messages: int
    put_bytes: int
    entries: int
    unsynced_answers: int
    spin_us: int
    error_number: int
    last_producer_same_cpu: int
    last_work_ns: int
    spinning: int
    no_room: int
    mover: ms_mover
    affinity: ms_affinity
    skip_verify_incarnation: int
    light: ms_light_queues
    meter: ms_put_meter
    recorder: ms_recorder_handle
    wall_ms: int
    clock_ns: int
    write_ns: int
    returned_ns: int
    return_reason: int
    waited_for_pool: int

class ms_writer_lines(Struct):
    intent_end: int
    wanted_end: int
    pass_started_ms: int
    clock_back_ms: int
    refused: int
    verified_flusher: int
    queue_table_wanted: int
    pool_waits: int
    intended_pass: int
    bus_errors: int
    is_beside_producer: int
    pad: Array[int]

class ms_writer_session(Struct):
    session: ms_session
    ring: Array[int]
    ring_bytes: int
    generation: int
    head: int
    acked: int
    broken: int
    touched: int
    has_put: int

class _Lib:
    MS_AFFINITY_NS: int
    MS_AHEAD_MAX: int
    MS_ALLOCATOR: int
    MS_BLANK_BYTES: int
    MS_BLANK_MAGIC: int
    MS_BLOCKED_REASONS_LAYOUT_VERSION: int
    MS_BLOCKED_REASON_BYTES: int
    MS_CASES: int
    MS_CASE_BAD_CRC: int
    MS_CASE_BAD_TEXT: int
    MS_CASE_BLANK: int
    MS_CASE_FOREIGN: int
    MS_CASE_MESSAGE: int
    MS_CASE_OFFSET_MISMATCH: int
    MS_CASE_OVERRUN: int
    MS_CASE_RANGE_END: int
    MS_CASE_TORN: int
    MS_CASE_ZEROES: int
    MS_CAUSES: int
    MS_CAUSE_BACKLOG: int
    MS_CAUSE_BLOCKED: int
    MS_CAUSE_CPU: int
    MS_CAUSE_FAILED: int
    MS_CAUSE_FAULT: int
    MS_CAUSE_LARGE: int
    MS_CAUSE_LOCK: int
    MS_CAUSE_NO_ROOM: int
    MS_CAUSE_POOL: int
    MS_CAUSE_RESTART: int
    MS_CAUSE_ROLL: int
    MS_CAUSE_ROUND: int
    MS_CAUSE_SEGMENT: int
    MS_CAUSE_SLAVE: int
    MS_CAUSE_START: int
    MS_CAUSE_STOPPED: int
    MS_CAUSE_SYNC: int
    MS_CAUSE_UNKNOWN: int
    MS_CAUSE_WOKEN_LATE: int
    MS_CAUSE_WRITE: int
    MS_CHECKPOINTER: int
    MS_CHECK_CRC: int
    MS_CHECK_OFFSET: int
    MS_CHECK_TEXT: int
    MS_CLEANER: int
    MS_CLEANING_LAYOUT_VERSION: int
    MS_CLEANING_REASON_BYTES: int
    MS_COLUMNS_FULL: int
    MS_COLUMNS_NEEDS_QUEUE: int
    MS_COLUMN_BODY: int
    MS_COLUMN_BODY_CRC: int
    MS_COLUMN_BODY_SIZE: int
    MS_COLUMN_BORN_HOST: int
    MS_COLUMN_BORN_TIMESTAMP: int
    MS_COLUMN_FLAG: int
    MS_COLUMN_GIVEN: int
    MS_COLUMN_MADE_BYTES_MAX: int
    MS_COLUMN_MSG_ID: int
    MS_COLUMN_PHYSICAL_OFFSET: int
    MS_COLUMN_PREPARED_OFFSET: int
    MS_COLUMN_PROPERTIES: int
    MS_COLUMN_PROPERTY: int
    MS_COLUMN_QUEUE_ID: int
    MS_COLUMN_QUEUE_OFFSET: int
    MS_COLUMN_RECONSUME_TIMES: int
    MS_COLUMN_SIZE: int
    MS_COLUMN_STORE_HOST: int
    MS_COLUMN_STORE_TIMESTAMP: int
    MS_COLUMN_SYS_FLAG: int
    MS_COLUMN_TOPIC: int
    MS_COMMITTER: int
    MS_COMMIT_BROKEN: int
    MS_COMMIT_FAILED: int
    MS_COMMIT_IDLE: int
    MS_COMMIT_ROUND_NS: int
    MS_COMMIT_SEGMENT: int
    MS_COMMIT_SMALL_BYTES: int
    MS_COMMIT_TIME: int
    MS_COMPLETIONS: int
    MS_CONTROL_LAYOUT_VERSION: int
    MS_CPU_BATCH: int
    MS_CPU_INTERACTIVE: int
    MS_DISPATCH_FAILED: int
    MS_DISPATCH_NEEDS_EXT: int
    MS_DISPATCH_NEEDS_FILE: int
    MS_DISPATCH_NEEDS_INDEX: int
    MS_DISPATCH_NEEDS_QUEUE: int
    MS_DISTRIBUTE_BUCKETS: int
    MS_DISTRIBUTE_ROOM: int
    MS_ENGINE_DIED: int
    MS_ENGINE_REPLACED: int
    MS_ENTRY_BATCH: int
    MS_ENTRY_MANY: int
    MS_ENTRY_PAD: int
    MS_ENTRY_PUT: int
    MS_ENTRY_RAW: int
    MS_ENTRY_SIDE: int
    MS_EXT_NEEDS_FILE: int
    MS_EXT_RUN_BYTES: int
    MS_EXT_TAIL_BYTES: int
    MS_EXT_UNIT_BYTES: int
    MS_FAILPOINT_ARMED: int
    MS_FAILPOINT_IDLE: int
    MS_FAILPOINT_NAME_BYTES: int
    MS_FAILPOINT_PROCESS_BYTES: int
    MS_FAILPOINT_STRUCK: int
    MS_FLUSHER: int
    MS_FOLLOW_IDLE: int
    MS_FOLLOW_LOST: int
    MS_FOLLOW_REPORT: int
    MS_FOLLOW_SUBMITTED: int
    MS_FOLLOW_TAKE: int
    MS_GATEWAY: int
    MS_GATHER_BYTES_MIN: int
    MS_GROUP_FAILED: int
    MS_GROUP_SEGMENT: int
    MS_GROUP_SEGMENTS_MAX: int
    MS_GROUP_STREAM_NS: int
    MS_GROUP_TIME: int
    MS_HA_ANSWER_NS: int
    MS_HA_CONFIRMS: int
    MS_HA_HEADER_BYTES: int
    MS_HA_INPUT_BYTES: int
    MS_HA_PLAIN: int
    MS_HA_PYTHON: int
    MS_HA_QUIET: int
    MS_HA_REPORT_BYTES: int
    MS_HA_SAYS_NOTHING: int
    MS_HA_SHORTER: int
    MS_HA_UNSENT: int
    MS_HOLDS_MAX: int
    MS_HOST_BYTES_MAX: int
    MS_INDEX_ENTRY_BYTES: int
    MS_INDEX_FULL: int
    MS_INDEX_HEADER_BYTES: int
    MS_INDEX_PROGRESS_BYTES: int
    MS_LATENCY_BUCKETS: int
    MS_LIGHT_QUEUES_MAX: int
    MS_LIGHT_TEXT_BYTES_MAX: int
    MS_LINE_BYTES: int
    MS_LINKS_MAX: int
    MS_LINK_ADDRESS_BYTES: int
    MS_LINK_CONNECTING: int
    MS_LINK_DETAIL_BYTES: int
    MS_LINK_HANDSHAKE: int
    MS_LINK_NONE: int
    MS_LINK_READY: int
    MS_LINK_SHUTDOWN: int
    MS_LINK_TRANSFER: int
    MS_METER_ENTRIES: int
    MS_MODE_MAPPED: int
    MS_MODE_POOL: int
    MS_MODE_SYNC: int
    MS_MOVE_AFTER_PASSES: int
    MS_MOVE_PAUSE_NS: int
    MS_MOVE_PAUSE_NS_MAX: int
    MS_PASS_BYTES: int
    MS_PASS_SLOTS: int
    MS_PHASES: int
    MS_PHASE_LOCK: int
    MS_PHASE_OTHER: int
    MS_PHASE_RING: int
    MS_PHASE_SEGMENT: int
    MS_PHASE_SLAVE: int
    MS_PHASE_SYNC: int
    MS_PHASE_TOUCH: int
    MS_PHASE_WRITE: int
    MS_POOL_BUFFERS_MAX: int
    MS_PRODUCER_AGAIN: int
    MS_PRODUCER_BUSY: int
    MS_PRODUCER_CLOSED: int
    MS_PRODUCER_FROZEN: int
    MS_PRODUCER_NO_SLAVE: int
    MS_PRODUCER_UNCONFIRMED: int
    MS_PRODUCER_UNFINISHED: int
    MS_PROPERTIES_BYTES_MAX: int
    MS_PUT_CONFIRMED: int
    MS_PUT_DURABLE: int
    MS_PUT_SLICE_NS: int
    MS_QUEUE_CHUNK_ENTRIES: int
    MS_QUEUE_ENTRY_BYTES: int
    MS_QUEUE_FILLER_SIZE: int
    MS_QUEUE_NEEDS_EXT: int
    MS_QUEUE_NEEDS_FILE: int
    MS_QUEUE_TOPIC_BYTES: int
    MS_QUEUE_WINDOW_BYTES: int
    MS_REASON_BYTES: int
    MS_RECORDER_LAYOUT_VERSION: int
    MS_RECORD_ALLOWANCE_BYTES: int
    MS_RECORD_BYTES_MIN: int
    MS_RECORD_MAGIC: int
    MS_REFUSED_BATCH: int
    MS_REFUSED_BODY_LENGTH: int
    MS_REFUSED_DISK_FULL: int
    MS_REFUSED_FENCED: int
    MS_REFUSED_LIGHT_QUEUES_FULL: int
    MS_REFUSED_LIGHT_QUEUE_NAME: int
    MS_REFUSED_LIGHT_QUEUE_PLACE: int
    MS_REFUSED_MALFORMED: int
    MS_REFUSED_NO: int
    MS_REFUSED_NO_SEGMENT: int
    MS_REFUSED_OFFSET: int
    MS_REFUSED_PROPERTIES_BYTES: int
    MS_REFUSED_PROPERTIES_LENGTH: int
    MS_REFUSED_QUEUES_FULL: int
    MS_REFUSED_QUEUE_ID: int
    MS_REFUSED_RAW: int
    MS_REFUSED_READ_ONLY: int
    MS_REFUSED_SEGMENT: int
    MS_REFUSED_SEQUENCE: int
    MS_REFUSED_SIDE: int
    MS_REFUSED_SLAVE: int
    MS_REFUSED_STOPPING: int
    MS_REFUSED_TOO_LARGE: int
    MS_REFUSED_TOO_MANY_SEGMENTS: int
    MS_REFUSED_TOPIC_BYTES: int
    MS_REFUSED_TOPIC_LENGTH: int
    MS_REFUSED_UNWRITABLE: int
    MS_REPLICATION_LAYOUT_VERSION: int
    MS_REPLICATOR: int
    MS_REPUTTER: int
    MS_REPUT_BACKLOG_BYTES: int
    MS_REPUT_DECIDE: int
    MS_REPUT_IDLE: int
    MS_REPUT_ROUND_NS: int
    MS_REPUT_SEGMENT: int
    MS_REPUT_TIME: int
    MS_REPUT_WARM_BYTES: int
    MS_ROLE_ASYNC_MASTER: int
    MS_ROLE_SLAVE: int
    MS_ROLE_SYNC_MASTER: int
    MS_RUN_CUT_SHORT: int
    MS_RUN_FAILED: int
    MS_RUN_FLUSHER: int
    MS_RUN_QUEUES: int
    MS_RUN_ROLLED: int
    MS_RUN_SEGMENT: int
    MS_RUN_SESSIONS: int
    MS_RUN_SIDE: int
    MS_RUN_TIME: int
    MS_SCHEDULER: int
    MS_SEAL_BYTES: int
    MS_SENDS_MAX: int
    MS_SEND_ANSWER_PIECES: int
    MS_SEND_HEADER_BYTES_MAX: int
    MS_SEND_PIECE_BYTES_MAX: int
    MS_SEND_PROPERTIES_MAX: int
    MS_SEND_TOPICS_MAX: int
    MS_SEND_TOPIC_BYTES_MAX: int
    MS_SESSION_DEAD: int
    MS_SESSION_FREE: int
    MS_SESSION_LAYOUT_VERSION: int
    MS_SESSION_OPEN: int
    MS_SESSION_SLOTS: int
    MS_SESSION_WORDS: int
    MS_SIDE_BYTES_MAX: int
    MS_SIZE_BUCKETS: int
    MS_STAGE_ANSWERED: int
    MS_STAGE_NOT_SUBMITTED: int
    MS_STAGE_SUBMITTED: int
    MS_STALLS: int
    MS_STALL_BLOCKED: int
    MS_STALL_CONFIRM: int
    MS_STALL_DIED: int
    MS_STALL_MINUTES: int
    MS_STALL_NS: int
    MS_STALL_PASS: int
    MS_STALL_PUTS: int
    MS_STALL_REQUEST: int
    MS_STALL_ROUND: int
    MS_STALL_START: int
    MS_STALL_STOPPED: int
    MS_STALL_SYNC: int
    MS_STALL_WRITE: int
    MS_STATE_DEGRADED: int
    MS_STATE_READ_ONLY: int
    MS_STATE_RECOVERING: int
    MS_STATE_RUNNING: int
    MS_STATE_STOPPED: int
    MS_STATE_STOPPING: int
    MS_STATS_LAYOUT_VERSION: int
    MS_STATS_SAMPLES: int
    MS_STATS_SNAPSHOTS: int
    MS_STATUS_COUNTS: int
    MS_STREAM_CLOSE_NS: int
    MS_STREAM_ROUNDS: int
    MS_SUPERVISOR: int
    MS_SYS_FLAG_BORN_V6: int
    MS_SYS_FLAG_PREPARED: int
    MS_SYS_FLAG_ROLLBACK: int
    MS_SYS_FLAG_STORE_V6: int
    MS_SYS_FLAG_TRANSACTION: int
    MS_TALLY_BODY_BYTES: int
    MS_TALLY_BYTES: int
    MS_TALLY_BY_QUEUE: int
    MS_TALLY_BY_STEP: int
    MS_TALLY_BY_TOPIC: int
    MS_TALLY_COMPRESSED: int
    MS_TALLY_DELAYED: int
    MS_TALLY_FIRST_OFFSET: int
    MS_TALLY_FIRST_TIMESTAMP: int
    MS_TALLY_LARGEST: int
    MS_TALLY_LAST_OFFSET: int
    MS_TALLY_LAST_TIMESTAMP: int
    MS_TALLY_MESSAGES: int
    MS_TALLY_NUMBERS: int
    MS_TALLY_QUEUE: int
    MS_TALLY_RETRIED: int
    MS_TALLY_STEP: int
    MS_TALLY_TRANSACTIONAL: int
    MS_TOPIC_BYTES_MAX: int
    MS_TOPIC_STATS_LAYOUT_VERSION: int
    MS_TOPIC_STATS_NAME_BYTES: int
    MS_TOUCHED_ALL: int
    MS_TOUCHED_APART: int
    MS_TOUCHED_OWN: int
    MS_UNDO_MAX: int
    MS_UUID_BYTES: int
    MS_WORKER_ABSENT: int
    MS_WORKER_FAILED: int
    MS_WORKER_KINDS: int
    MS_WORKER_READY: int
    MS_WORKER_STARTING: int
    MS_WORKER_STOPPING: int
    MS_WRITER: int
    def ms_add_u32(self, a0: CData, a1: int, /) -> int: ...
    def ms_affinity_begin(self, a0: ms_affinity, /) -> None: ...
    def ms_affinity_follow(self, a0: ms_affinity, a1: int, /) -> None: ...
    def ms_affinity_note(self, a0: ms_affinity, a1: int, a2: int, /) -> None: ...
    def ms_attach_count_add(self, a0: int, a1: int, /) -> int: ...
    def ms_attach_count_get(self, a0: int, /) -> int: ...
    def ms_blocked_reason_read(self, a0: ms_blocked_reasons, a1: int, a2: CData | bytes, /) -> None: ...
    def ms_blocked_reason_write(self, a0: ms_blocked_reasons, a1: int, a2: CData | bytes, /) -> None: ...
    def ms_blocked_reasons_check(self, a0: ms_blocked_reasons, a1: int, /) -> int: ...
    def ms_blocked_reasons_format(self, a0: ms_blocked_reasons, /) -> None: ...
    def ms_calibrate_wake_ns(self, a0: int, a1: int, /) -> int: ...
    def ms_cas_i64(self, a0: CData, a1: int, a2: int, /) -> int: ...
    def ms_cas_u32(self, a0: CData, a1: int, a2: int, /) -> int: ...
    def ms_check_chains(self, a0: CData | bytes, a1: int, a2: int, a3: CData, /) -> int: ...
    def ms_check_count_keys(self, a0: CData | bytes, a1: int, a2: int, a3: int, /) -> int: ...
    def ms_check_entries(self, a0: CData | bytes, a1: int, a2: int, a3: CData | bytes, a4: int, a5: int, a6: int, a7: CData | bytes, a8: int, a9: int, a10: int, /) -> int: ...
    def ms_check_keys(self, a0: CData | bytes, a1: int, a2: int, a3: CData | bytes, a4: int, a5: int, /) -> int: ...
    def ms_cleaning_check(self, a0: ms_cleaning, a1: int, /) -> int: ...
    def ms_cleaning_format(self, a0: ms_cleaning, a1: int, /) -> None: ...
    def ms_cleaning_refuse_holds(self, a0: ms_cleaning, a1: int, /) -> None: ...
    def ms_clock_monotonic_ns(self, /) -> int: ...
    def ms_columns_fill(self, a0: ms_record, a1: int, a2: ms_column, a3: int, /) -> None: ...
    def ms_columns_gather(self, a0: CData | bytes, a1: int, a2: int, a3: int, a4: CData | bytes, a5: int, a6: ms_row_filter, a7: int, a8: int, a9: int, a10: ms_record, a11: ms_selection, /) -> int: ...
    def ms_columns_measure(self, a0: ms_record, a1: int, a2: ms_column, a3: int, /) -> None: ...
    def ms_columns_select(self, a0: CData | bytes, a1: int, a2: int, a3: int, a4: int, a5: ms_row_filter, a6: int, a7: int, a8: int, a9: ms_record, a10: ms_selection, /) -> int: ...
    def ms_control_check(self, a0: ms_control, a1: int, /) -> int: ...
    def ms_control_committed_slot(self, a0: ms_control, a1: CData, a2: CData, /) -> None: ...
    def ms_control_flush_pair(self, a0: ms_control, a1: CData, a2: CData, /) -> None: ...
    def ms_control_freeze(self, a0: ms_control, a1: int, a2: int, a3: CData | bytes, /) -> int: ...
    def ms_control_publish(self, a0: ms_control, /) -> None: ...
    def ms_control_publish_confirm(self, a0: ms_control, a1: int, /) -> None: ...
    def ms_control_publish_flushed(self, a0: ms_control, a1: int, a2: int, /) -> None: ...
    def ms_control_publish_synced(self, a0: ms_control, a1: int, a2: int, /) -> None: ...
    def ms_control_used_sessions(self, a0: ms_control, a1: int, a2: CData, /) -> int: ...
    def ms_control_wait_synced(self, a0: ms_control, a1: int, a2: int, a3: int, a4: int, /) -> None: ...
    def ms_cpu_schedule(self, a0: int, /) -> int: ...
    def ms_crc32(self, a0: int, a1: CData | bytes, a2: int, /) -> int: ...
    def ms_crc32_by_cpu(self, a0: int, a1: CData | bytes, a2: int, /) -> int: ...
    def ms_crc32_copy(self, a0: CData | bytes, a1: CData | bytes, a2: int, /) -> int: ...
    def ms_crc32_tables(self, a0: int, a1: CData | bytes, a2: int, /) -> int: ...
    def ms_current_cpu(self, /) -> int: ...
    def ms_dispatch_run(self, a0: ms_dispatch, a1: CData | bytes, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_dispatch_stats_add(self, a0: ms_dispatch_stats, a1: int, a2: int, a3: int, a4: int, a5: int, a6: int, /) -> None: ...
    def ms_dispatch_touched(self, a0: ms_touched_queue, a1: int, a2: int, a3: CData | bytes, a4: int, a5: int, a6: int, a7: CData, a8: CData, /) -> int: ...
    def ms_distribute_bucket(self, a0: int, /) -> int: ...
    def ms_entry_fill(self, a0: CData | bytes, a1: ms_entry, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, a5: int, a6: CData | bytes, a7: int, /) -> None: ...
    def ms_entry_layout_bytes(self, a0: int, a1: int, a2: int, /) -> int: ...
    def ms_ext_drop(self, a0: ms_ext_set, a1: int, a2: int, /) -> None: ...
    def ms_ext_put(self, a0: ms_ext_set, a1: int, a2: int, a3: int, a4: int, a5: CData, /) -> int: ...
    def ms_ext_write(self, a0: ms_ext_set, a1: int, a2: int, /) -> int: ...
    def ms_failpoint_built(self, /) -> int: ...
    def ms_failpoint_reach(self, a0: CData | bytes, /) -> None: ...
    def ms_failpoint_use(self, a0: ms_failpoint, a1: CData | bytes, /) -> None: ...
    def ms_filter_add(self, a0: ms_row_filter, a1: CData | bytes, a2: int, a3: int, a4: int, a5: int, /) -> int: ...
    def ms_filter_rehash(self, a0: ms_row_filter, /) -> None: ...
    def ms_flush_allocate(self, a0: int, a1: int, a2: int, /) -> int: ...
    def ms_flush_allocate_windows(self, a0: int, a1: CData, a2: int, a3: int, a4: int, a5: int, /) -> int: ...
    def ms_flush_check(self, a0: int, /) -> int: ...
    def ms_flush_fdatasync(self, a0: int, /) -> int: ...
    def ms_flush_file_system(self, a0: int, /) -> int: ...
    def ms_flush_fsync(self, a0: int, /) -> int: ...
    def ms_flush_punch(self, a0: int, a1: int, a2: int, /) -> int: ...
    def ms_flush_pwrite_all(self, a0: int, a1: CData | bytes, a2: int, a3: int, /) -> int: ...
    def ms_flush_start(self, a0: int, /) -> int: ...
    def ms_flush_zero_range(self, a0: int, a1: int, a2: int, /) -> int: ...
    def ms_group_commit_once(self, a0: ms_group_commit, /) -> int: ...
    def ms_group_commit_run(self, a0: ms_group_commit, a1: int, a2: int, /) -> int: ...
    def ms_ha_confirm(self, a0: ms_ha_links, a1: int, /) -> None: ...
    def ms_ha_follow_run(self, a0: ms_ha_follow, a1: int, /) -> int: ...
    def ms_ha_links_listen(self, a0: ms_ha_links, a1: int, /) -> int: ...
    def ms_ha_links_lock(self, a0: ms_ha_links, /) -> None: ...
    def ms_ha_links_send(self, a0: ms_ha_links, a1: int, a2: int, /) -> int: ...
    def ms_ha_links_unlock(self, a0: ms_ha_links, /) -> None: ...
    def ms_ha_take_report(self, a0: ms_ha_link, a1: int, a2: int, /) -> int: ...
    def ms_hold_find(self, a0: ms_cleaning, a1: int, a2: int, /) -> int: ...
    def ms_hold_reap(self, a0: ms_cleaning, a1: int, a2: int, /) -> int: ...
    def ms_hold_release(self, a0: ms_cleaning, a1: int, a2: int, /) -> None: ...
    def ms_hold_take(self, a0: ms_cleaning, a1: int, a2: int, /) -> int: ...
    def ms_index_count_tail(self, a0: ms_index_file, a1: int, /) -> int: ...
    def ms_index_inherit(self, a0: ms_index_file, a1: ms_index_header, /) -> int: ...
    def ms_index_key_hash(self, a0: CData | bytes, a1: int, a2: CData | bytes, a3: int, /) -> int: ...
    def ms_index_newest_offset(self, a0: ms_index_file, /) -> int: ...
    def ms_index_put(self, a0: ms_index_file, a1: ms_index_progress, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_index_read_header(self, a0: ms_index_file, a1: ms_index_header, /) -> None: ...
    def ms_index_roll_back(self, a0: ms_index_file, a1: ms_index_progress, /) -> int: ...
    def ms_latch_arm(self, a0: ms_latch, a1: CData | bytes, /) -> None: ...
    def ms_latch_close(self, a0: CData | bytes, /) -> None: ...
    def ms_latch_disarm(self, a0: ms_latch, /) -> None: ...
    def ms_latch_open(self, a0: CData | bytes, a1: CData, /) -> CData: ...
    def ms_latch_wait(self, a0: ms_latch, a1: CData | bytes, a2: int, /) -> int: ...
    def ms_latch_wakeup(self, a0: ms_latch, a1: CData | bytes, /) -> None: ...
    def ms_latch_wakeup_fenced(self, a0: ms_latch, a1: CData | bytes, /) -> None: ...
    def ms_latch_wakeup_unmarked(self, a0: ms_latch, a1: CData | bytes, /) -> None: ...
    def ms_latency_add(self, a0: ms_latency, a1: int, /) -> None: ...
    def ms_latency_bound_ns(self, a0: int, /) -> int: ...
    def ms_light_advance(self, a0: ms_light_queues, a1: ms_control, a2: ms_queue_table, a3: int, /) -> None: ...
    def ms_light_drop_places(self, a0: ms_light_queues, a1: CData | bytes, a2: int, /) -> None: ...
    def ms_light_has_places(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_light_prepare(self, a0: ms_light_queues, a1: ms_queue_table, a2: CData | bytes, a3: int, a4: int, a5: CData | bytes, a6: int, /) -> int: ...
    def ms_load_i64(self, a0: CData, /) -> int: ...
    def ms_load_u32(self, a0: CData, /) -> int: ...
    def ms_memory_lock(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_memory_populate(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_mover_note(self, a0: ms_mover, a1: int, a2: int, /) -> None: ...
    def ms_new_file_in_place(self, a0: int, /) -> None: ...
    def ms_new_file_link(self, a0: int, a1: int, a2: CData | bytes, /) -> int: ...
    def ms_new_file_rename(self, a0: CData | bytes, a1: CData | bytes, /) -> int: ...
    def ms_new_file_system(self, a0: int, /) -> int: ...
    def ms_poll_until_above(self, a0: ms_position, a1: int, a2: int, a3: int, /) -> int: ...
    def ms_pool_commit_run(self, a0: ms_pool_commit, a1: int, a2: int, /) -> int: ...
    def ms_process_adopt_orphans(self, /) -> int: ...
    def ms_process_end_with_parent(self, /) -> int: ...
    def ms_process_show_command(self, a0: CData | bytes, a1: int, a2: CData | bytes, a3: int, /) -> int: ...
    def ms_producer_attach(self, a0: ms_producer, /) -> None: ...
    def ms_producer_await(self, a0: ms_producer, a1: int, /) -> int: ...
    def ms_producer_calls(self, /) -> ms_producer_calls: ...
    def ms_producer_claim(self, a0: ms_producer, a1: CData, /) -> None: ...
    def ms_producer_entry_limit(self, a0: ms_producer, /) -> int: ...
    def ms_producer_fill(self, a0: ms_producer, a1: ms_entry, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, /) -> int: ...
    def ms_producer_finish(self, a0: ms_producer, a1: int, /) -> None: ...
    def ms_producer_is_answered(self, a0: ms_producer, a1: int, /) -> int: ...
    def ms_producer_is_closed(self, a0: ms_producer, /) -> int: ...
    def ms_producer_prefix(self, a0: ms_producer, a1: CData | bytes, a2: CData | bytes, a3: int, a4: CData | bytes, a5: int, a6: int, a7: int, /) -> int: ...
    def ms_producer_publish(self, a0: ms_producer, /) -> None: ...
    def ms_producer_publish_filled(self, a0: ms_producer, /) -> None: ...
    def ms_producer_put_entry(self, a0: ms_producer, a1: ms_entry, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, a5: int, a6: CData | bytes, a7: int, a8: int, a9: int, /) -> int: ...
    def ms_producer_reserve(self, a0: ms_producer, a1: CData | bytes, a2: int, a3: int, a4: int, a5: int, a6: CData, /) -> Array[int]: ...
    def ms_producer_stored_ns(self, a0: int, a1: int, /) -> int: ...
    def ms_producer_submit(self, a0: ms_producer, a1: ms_entry, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, a5: int, a6: CData | bytes, a7: int, a8: int, /) -> int: ...
    def ms_producer_wait_acked(self, a0: ms_producer, a1: int, a2: int, a3: ms_completion, /) -> int: ...
    def ms_producer_wait_for_room(self, a0: ms_producer, a1: int, a2: int, /) -> int: ...
    def ms_producer_wait_persisted(self, a0: ms_producer, a1: int, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_put_meter_exercise(self, a0: ms_put_meter, a1: int, a2: int, /) -> None: ...
    def ms_queue_add(self, a0: ms_queue_set, a1: CData | bytes, a2: int, a3: int, /) -> int: ...
    def ms_queue_count_entries(self, a0: int, a1: int, /) -> int: ...
    def ms_queue_encode_entry(self, a0: CData | bytes, a1: int, a2: int, a3: int, /) -> None: ...
    def ms_queue_fill(self, a0: int, a1: int, /) -> int: ...
    def ms_queue_find(self, a0: ms_queue_set, a1: CData | bytes, a2: int, a3: int, /) -> int: ...
    def ms_queue_live_entries(self, a0: CData | bytes, a1: int, a2: int, /) -> int: ...
    def ms_queue_put(self, a0: ms_queue_set, a1: int, a2: int, a3: int, a4: int, a5: int, a6: int, a7: CData, /) -> int: ...
    def ms_queue_rehash(self, a0: ms_queue_set, /) -> None: ...
    def ms_queue_table_bytes(self, a0: int, /) -> int: ...
    def ms_queue_table_check(self, a0: ms_queue_table, a1: int, /) -> int: ...
    def ms_queue_table_copy(self, a0: ms_queue_table, a1: ms_queue_table, /) -> int: ...
    def ms_queue_table_find(self, a0: ms_queue_table, a1: CData | bytes, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_queue_table_format(self, a0: ms_queue_table, a1: int, a2: int, /) -> None: ...
    def ms_queue_table_set(self, a0: ms_queue_table, a1: CData | bytes, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_queue_write_gathered(self, a0: ms_queue_set, /) -> int: ...
    def ms_record_body_at(self, a0: int, /) -> int: ...
    def ms_record_body_crc(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_record_bytes(self, a0: int, a1: int, a2: int, a3: int, /) -> int: ...
    def ms_record_classify(self, a0: CData | bytes, a1: int, a2: int, a3: int, /) -> int: ...
    def ms_record_encode(self, a0: CData | bytes, a1: ms_record_template, /) -> int: ...
    def ms_record_encode_blank(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_record_stamp(self, a0: CData | bytes, a1: int, a2: int, a3: int, /) -> None: ...
    def ms_record_text_is_clean(self, a0: CData | bytes, a1: int, /) -> int: ...
    def ms_recorder_begin_window(self, a0: ms_recorder_handle, a1: int, /) -> None: ...
    def ms_recorder_check(self, a0: ms_recorder, a1: int, /) -> int: ...
    def ms_recorder_check_stopped(self, a0: ms_recorder_handle, a1: int, /) -> None: ...
    def ms_recorder_close(self, a0: ms_recorder_handle, /) -> None: ...
    def ms_recorder_count_resumes(self, /) -> None: ...
    def ms_recorder_format(self, a0: ms_recorder, a1: CData | bytes, /) -> None: ...
    def ms_recorder_note(self, a0: ms_recorder_handle, a1: ms_stall, /) -> None: ...
    def ms_recorder_note_held(self, a0: ms_recorder_handle, /) -> None: ...
    def ms_recorder_note_puts(self, a0: ms_recorder_handle, a1: ms_stall, a2: ms_stall, /) -> None: ...
    def ms_recorder_open(self, a0: ms_recorder_handle, a1: ms_recorder, a2: int, a3: int, /) -> None: ...
    def ms_recorder_resumes(self, a0: CData, /) -> int: ...
    def ms_recorder_set_phase(self, a0: ms_recorder_handle, a1: int, a2: int, /) -> None: ...
    def ms_recorder_waiting_since(self, a0: ms_waiting, a1: int, /) -> int: ...
    def ms_replication_check(self, a0: ms_replication, a1: int, /) -> int: ...
    def ms_replication_clear(self, a0: ms_replication, /) -> None: ...
    def ms_replication_format(self, a0: ms_replication, a1: int, /) -> None: ...
    def ms_replication_read_texts(self, a0: CData, a1: CData | bytes, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, /) -> int: ...
    def ms_replication_write_texts(self, a0: CData, a1: CData | bytes, a2: CData | bytes, a3: CData | bytes, a4: CData | bytes, /) -> None: ...
    def ms_reput_publish(self, a0: ms_reput, a1: int, a2: int, /) -> None: ...
    def ms_reput_run(self, a0: ms_reput, a1: int, a2: int, /) -> int: ...
    def ms_scan_sync(self, a0: CData | bytes, a1: int, a2: int, a3: int, a4: int, /) -> int: ...
    def ms_scan_walk(self, a0: CData | bytes, a1: int, a2: int, a3: int, a4: int, a5: int, a6: ms_walk, /) -> None: ...
    def ms_seal_count(self, a0: ms_seal, a1: int, /) -> None: ...
    def ms_seal_fits(self, a0: ms_seal, a1: int, a2: CData | bytes, a3: int, /) -> int: ...
    def ms_seal_of(self, a0: ms_seal, a1: int, a2: CData | bytes, a3: int, /) -> int: ...
    def ms_seal_put(self, a0: ms_seal, a1: int, a2: CData | bytes, a3: int, /) -> None: ...
    def ms_seal_room(self, a0: ms_seal, /) -> int: ...
    def ms_sends_answer(self, a0: ms_sends, a1: ms_producer, a2: int, /) -> None: ...
    def ms_sends_take(self, a0: ms_sends, a1: ms_producer, a2: CData | bytes, a3: int, a4: CData | bytes, a5: int, /) -> int: ...
    def ms_sequence_load(self, a0: ms_sequence, /) -> int: ...
    def ms_sequence_raise(self, a0: ms_sequence, /) -> None: ...
    def ms_sequence_raise_for_next(self, a0: ms_sequence, /) -> None: ...
    def ms_sequence_wait(self, a0: ms_sequence, a1: int, a2: int, /) -> int: ...
    def ms_session_bytes(self, a0: int, /) -> int: ...
    def ms_session_check(self, a0: ms_session, a1: int, /) -> int: ...
    def ms_session_format(self, a0: ms_session, a1: int, a2: int, a3: int, a4: int, /) -> None: ...
    def ms_session_guard_add(self, a0: int, a1: CData | bytes, a2: int, /) -> None: ...
    def ms_session_guard_broken(self, a0: int, /) -> int: ...
    def ms_session_guard_install(self, a0: CData, /) -> int: ...
    def ms_session_guard_remove(self, a0: int, /) -> None: ...
    def ms_sleep_precisely(self, /) -> int: ...
    def ms_stall_is_whole(self, a0: ms_stall, /) -> int: ...
    def ms_stats_take_sample(self, a0: ms_store_stats, a1: ms_stats_sample, /) -> None: ...
    def ms_stats_take_snapshot(self, a0: ms_store_stats, a1: int, /) -> None: ...
    def ms_store_i64(self, a0: CData, a1: int, /) -> None: ...
    def ms_store_stats_check(self, a0: ms_store_stats, a1: int, /) -> int: ...
    def ms_store_stats_format(self, a0: ms_store_stats, /) -> None: ...
    def ms_store_u32(self, a0: CData, a1: int, /) -> None: ...
    def ms_stream_begin(self, a0: ms_stream, a1: int, a2: int, /) -> None: ...
    def ms_stream_wait(self, a0: ms_stream, a1: ms_position, a2: int, a3: int, /) -> int: ...
    def ms_stream_worked(self, a0: ms_stream, a1: int, /) -> None: ...
    def ms_tally_add(self, a0: ms_tally, a1: ms_record, a2: int, a3: CData | bytes, /) -> int: ...
    def ms_tally_clear(self, a0: ms_tally, /) -> None: ...
    def ms_tally_numbers(self, a0: ms_tally, a1: int, a2: CData | bytes, /) -> None: ...
    def ms_tally_topics(self, a0: ms_tally, a1: ms_text, /) -> None: ...
    def ms_topic_stats_bytes(self, a0: int, /) -> int: ...
    def ms_topic_stats_check(self, a0: ms_topic_stats, a1: int, /) -> int: ...
    def ms_topic_stats_find(self, a0: ms_topic_stats, a1: CData | bytes, a2: int, /) -> ms_topic_count: ...
    def ms_topic_stats_format(self, a0: ms_topic_stats, a1: int, /) -> None: ...
    def ms_writer_attach_session(self, a0: ms_writer, a1: int, a2: ms_session, a3: int, a4: int, /) -> None: ...
    def ms_writer_detach_session(self, a0: ms_writer, a1: int, /) -> None: ...
    def ms_writer_open(self, a0: ms_writer, /) -> None: ...
    def ms_writer_roll_back(self, a0: ms_control, a1: ms_queue_table, /) -> int: ...
    def ms_writer_rolled_back(self, a0: ms_control, /) -> None: ...
    def ms_writer_run(self, a0: ms_writer, a1: int, /) -> int: ...
    def ms_writer_session_drained(self, a0: ms_writer, a1: int, /) -> int: ...
    def ms_writer_use_table(self, a0: ms_writer, a1: ms_queue_table, /) -> int: ...

class _New:
    @overload
    def __call__(self, cdecl: Literal["struct ms_affinity *", "struct ms_affinity[]"], init: object = ...) -> ms_affinity: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_allocator_line *", "struct ms_allocator_line[]"], init: object = ...) -> ms_allocator_line: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_blocked_reason *", "struct ms_blocked_reason[]"], init: object = ...) -> ms_blocked_reason: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_blocked_reasons *", "struct ms_blocked_reasons[]"], init: object = ...) -> ms_blocked_reasons: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_cleaning *", "struct ms_cleaning[]"], init: object = ...) -> ms_cleaning: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_column *", "struct ms_column[]"], init: object = ...) -> ms_column: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_commit_slot *", "struct ms_commit_slot[]"], init: object = ...) -> ms_commit_slot: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_completion *", "struct ms_completion[]"], init: object = ...) -> ms_completion: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_control *", "struct ms_control[]"], init: object = ...) -> ms_control: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_dispatch *", "struct ms_dispatch[]"], init: object = ...) -> ms_dispatch: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_dispatch_stats *", "struct ms_dispatch_stats[]"], init: object = ...) -> ms_dispatch_stats: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_entry *", "struct ms_entry[]"], init: object = ...) -> ms_entry: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ext_queue *", "struct ms_ext_queue[]"], init: object = ...) -> ms_ext_queue: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ext_run *", "struct ms_ext_run[]"], init: object = ...) -> ms_ext_run: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ext_set *", "struct ms_ext_set[]"], init: object = ...) -> ms_ext_set: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_failpoint *", "struct ms_failpoint[]"], init: object = ...) -> ms_failpoint: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_filter_queue *", "struct ms_filter_queue[]"], init: object = ...) -> ms_filter_queue: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_flush_slot *", "struct ms_flush_slot[]"], init: object = ...) -> ms_flush_slot: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_flusher_lines *", "struct ms_flusher_lines[]"], init: object = ...) -> ms_flusher_lines: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_group_commit *", "struct ms_group_commit[]"], init: object = ...) -> ms_group_commit: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ha_follow *", "struct ms_ha_follow[]"], init: object = ...) -> ms_ha_follow: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ha_link *", "struct ms_ha_link[]"], init: object = ...) -> ms_ha_link: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_ha_links *", "struct ms_ha_links[]"], init: object = ...) -> ms_ha_links: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_hold *", "struct ms_hold[]"], init: object = ...) -> ms_hold: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_identity *", "struct ms_identity[]"], init: object = ...) -> ms_identity: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_index_file *", "struct ms_index_file[]"], init: object = ...) -> ms_index_file: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_index_header *", "struct ms_index_header[]"], init: object = ...) -> ms_index_header: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_index_progress *", "struct ms_index_progress[]"], init: object = ...) -> ms_index_progress: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_latch *", "struct ms_latch[]"], init: object = ...) -> ms_latch: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_latency *", "struct ms_latency[]"], init: object = ...) -> ms_latency: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_light_queues *", "struct ms_light_queues[]"], init: object = ...) -> ms_light_queues: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_link *", "struct ms_link[]"], init: object = ...) -> ms_link: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_mover *", "struct ms_mover[]"], init: object = ...) -> ms_mover: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_pool_buffer *", "struct ms_pool_buffer[]"], init: object = ...) -> ms_pool_buffer: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_pool_commit *", "struct ms_pool_commit[]"], init: object = ...) -> ms_pool_commit: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_position *", "struct ms_position[]"], init: object = ...) -> ms_position: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_producer *", "struct ms_producer[]"], init: object = ...) -> ms_producer: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_producer_calls *", "struct ms_producer_calls[]"], init: object = ...) -> ms_producer_calls: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_put_meter *", "struct ms_put_meter[]"], init: object = ...) -> ms_put_meter: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_put_stats *", "struct ms_put_stats[]"], init: object = ...) -> ms_put_stats: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_queue *", "struct ms_queue[]"], init: object = ...) -> ms_queue: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_queue_chunk *", "struct ms_queue_chunk[]"], init: object = ...) -> ms_queue_chunk: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_queue_set *", "struct ms_queue_set[]"], init: object = ...) -> ms_queue_set: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_queue_slot *", "struct ms_queue_slot[]"], init: object = ...) -> ms_queue_slot: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_queue_table *", "struct ms_queue_table[]"], init: object = ...) -> ms_queue_table: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_record *", "struct ms_record[]"], init: object = ...) -> ms_record: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_record_template *", "struct ms_record_template[]"], init: object = ...) -> ms_record_template: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_recorder *", "struct ms_recorder[]"], init: object = ...) -> ms_recorder: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_recorder_handle *", "struct ms_recorder_handle[]"], init: object = ...) -> ms_recorder_handle: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_recorder_ring *", "struct ms_recorder_ring[]"], init: object = ...) -> ms_recorder_ring: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_replication *", "struct ms_replication[]"], init: object = ...) -> ms_replication: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_replicator_lines *", "struct ms_replicator_lines[]"], init: object = ...) -> ms_replicator_lines: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_reput *", "struct ms_reput[]"], init: object = ...) -> ms_reput: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_row_filter *", "struct ms_row_filter[]"], init: object = ...) -> ms_row_filter: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_seal *", "struct ms_seal[]"], init: object = ...) -> ms_seal: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_segment *", "struct ms_segment[]"], init: object = ...) -> ms_segment: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_selection *", "struct ms_selection[]"], init: object = ...) -> ms_selection: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_send *", "struct ms_send[]"], init: object = ...) -> ms_send: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_send_topic *", "struct ms_send_topic[]"], init: object = ...) -> ms_send_topic: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_sends *", "struct ms_sends[]"], init: object = ...) -> ms_sends: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_sequence *", "struct ms_sequence[]"], init: object = ...) -> ms_sequence: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_session *", "struct ms_session[]"], init: object = ...) -> ms_session: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_session_account *", "struct ms_session_account[]"], init: object = ...) -> ms_session_account: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_session_slot *", "struct ms_session_slot[]"], init: object = ...) -> ms_session_slot: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stall *", "struct ms_stall[]"], init: object = ...) -> ms_stall: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stall_minute *", "struct ms_stall_minute[]"], init: object = ...) -> ms_stall_minute: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_state *", "struct ms_state[]"], init: object = ...) -> ms_state: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stats_history *", "struct ms_stats_history[]"], init: object = ...) -> ms_stats_history: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stats_sample *", "struct ms_stats_sample[]"], init: object = ...) -> ms_stats_sample: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stats_snapshot *", "struct ms_stats_snapshot[]"], init: object = ...) -> ms_stats_snapshot: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_store_stats *", "struct ms_store_stats[]"], init: object = ...) -> ms_store_stats: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_stream *", "struct ms_stream[]"], init: object = ...) -> ms_stream: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_sync_stats *", "struct ms_sync_stats[]"], init: object = ...) -> ms_sync_stats: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_tally *", "struct ms_tally[]"], init: object = ...) -> ms_tally: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_tally_group *", "struct ms_tally_group[]"], init: object = ...) -> ms_tally_group: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_text *", "struct ms_text[]"], init: object = ...) -> ms_text: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_topic_count *", "struct ms_topic_count[]"], init: object = ...) -> ms_topic_count: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_topic_stats *", "struct ms_topic_stats[]"], init: object = ...) -> ms_topic_stats: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_touched_queue *", "struct ms_touched_queue[]"], init: object = ...) -> ms_touched_queue: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_undo *", "struct ms_undo[]"], init: object = ...) -> ms_undo: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_waiting *", "struct ms_waiting[]"], init: object = ...) -> ms_waiting: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_walk *", "struct ms_walk[]"], init: object = ...) -> ms_walk: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_worker *", "struct ms_worker[]"], init: object = ...) -> ms_worker: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_writer *", "struct ms_writer[]"], init: object = ...) -> ms_writer: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_writer_lines *", "struct ms_writer_lines[]"], init: object = ...) -> ms_writer_lines: ...
    @overload
    def __call__(self, cdecl: Literal["struct ms_writer_session *", "struct ms_writer_session[]"], init: object = ...) -> ms_writer_session: ...
    @overload
    def __call__(self, cdecl: Literal["int8_t *", "int8_t[]", "int8_t[2]", "uint8_t *", "uint8_t[]", "uint8_t[2]", "int32_t *", "int32_t[]", "int32_t[2]", "uint32_t *", "uint32_t[]", "uint32_t[2]", "int64_t *", "int64_t[]", "int64_t[2]", "uint64_t *", "uint64_t[]", "uint64_t[2]", "int *", "int[]", "int[2]", "uint16_t *", "uint16_t[]", "uint16_t[2]", "int16_t *", "int16_t[]", "int16_t[2]"], init: object = ...) -> Array[int]: ...
    @overload
    def __call__(self, cdecl: Literal["char *", "char[]"], init: object = ...) -> Array[bytes]: ...
    @overload
    def __call__(self, cdecl: str, init: object = ...) -> _CData: ...

_CData = CData

class _FFI:
    NULL: Any  # of every pointer's type
    CData = _CData
    new: _New
    def new_allocator(self, *, should_clear_after_alloc: bool = True) -> _New: ...
    @overload
    def addressof(self, cdata: _C) -> _C: ...
    @overload
    def addressof(self, cdata: _CData, field: str | int, *fields: str | int) -> Any: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_affinity *", "struct ms_affinity[]"], value: object) -> ms_affinity: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_allocator_line *", "struct ms_allocator_line[]"], value: object) -> ms_allocator_line: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_blocked_reason *", "struct ms_blocked_reason[]"], value: object) -> ms_blocked_reason: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_blocked_reasons *", "struct ms_blocked_reasons[]"], value: object) -> ms_blocked_reasons: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_cleaning *", "struct ms_cleaning[]"], value: object) -> ms_cleaning: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_column *", "struct ms_column[]"], value: object) -> ms_column: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_commit_slot *", "struct ms_commit_slot[]"], value: object) -> ms_commit_slot: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_completion *", "struct ms_completion[]"], value: object) -> ms_completion: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_control *", "struct ms_control[]"], value: object) -> ms_control: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_dispatch *", "struct ms_dispatch[]"], value: object) -> ms_dispatch: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_dispatch_stats *", "struct ms_dispatch_stats[]"], value: object) -> ms_dispatch_stats: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_entry *", "struct ms_entry[]"], value: object) -> ms_entry: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ext_queue *", "struct ms_ext_queue[]"], value: object) -> ms_ext_queue: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ext_run *", "struct ms_ext_run[]"], value: object) -> ms_ext_run: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ext_set *", "struct ms_ext_set[]"], value: object) -> ms_ext_set: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_failpoint *", "struct ms_failpoint[]"], value: object) -> ms_failpoint: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_filter_queue *", "struct ms_filter_queue[]"], value: object) -> ms_filter_queue: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_flush_slot *", "struct ms_flush_slot[]"], value: object) -> ms_flush_slot: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_flusher_lines *", "struct ms_flusher_lines[]"], value: object) -> ms_flusher_lines: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_group_commit *", "struct ms_group_commit[]"], value: object) -> ms_group_commit: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ha_follow *", "struct ms_ha_follow[]"], value: object) -> ms_ha_follow: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ha_link *", "struct ms_ha_link[]"], value: object) -> ms_ha_link: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_ha_links *", "struct ms_ha_links[]"], value: object) -> ms_ha_links: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_hold *", "struct ms_hold[]"], value: object) -> ms_hold: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_identity *", "struct ms_identity[]"], value: object) -> ms_identity: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_index_file *", "struct ms_index_file[]"], value: object) -> ms_index_file: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_index_header *", "struct ms_index_header[]"], value: object) -> ms_index_header: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_index_progress *", "struct ms_index_progress[]"], value: object) -> ms_index_progress: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_latch *", "struct ms_latch[]"], value: object) -> ms_latch: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_latency *", "struct ms_latency[]"], value: object) -> ms_latency: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_light_queues *", "struct ms_light_queues[]"], value: object) -> ms_light_queues: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_link *", "struct ms_link[]"], value: object) -> ms_link: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_mover *", "struct ms_mover[]"], value: object) -> ms_mover: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_pool_buffer *", "struct ms_pool_buffer[]"], value: object) -> ms_pool_buffer: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_pool_commit *", "struct ms_pool_commit[]"], value: object) -> ms_pool_commit: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_position *", "struct ms_position[]"], value: object) -> ms_position: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_producer *", "struct ms_producer[]"], value: object) -> ms_producer: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_producer_calls *", "struct ms_producer_calls[]"], value: object) -> ms_producer_calls: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_put_meter *", "struct ms_put_meter[]"], value: object) -> ms_put_meter: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_put_stats *", "struct ms_put_stats[]"], value: object) -> ms_put_stats: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_queue *", "struct ms_queue[]"], value: object) -> ms_queue: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_queue_chunk *", "struct ms_queue_chunk[]"], value: object) -> ms_queue_chunk: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_queue_set *", "struct ms_queue_set[]"], value: object) -> ms_queue_set: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_queue_slot *", "struct ms_queue_slot[]"], value: object) -> ms_queue_slot: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_queue_table *", "struct ms_queue_table[]"], value: object) -> ms_queue_table: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_record *", "struct ms_record[]"], value: object) -> ms_record: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_record_template *", "struct ms_record_template[]"], value: object) -> ms_record_template: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_recorder *", "struct ms_recorder[]"], value: object) -> ms_recorder: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_recorder_handle *", "struct ms_recorder_handle[]"], value: object) -> ms_recorder_handle: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_recorder_ring *", "struct ms_recorder_ring[]"], value: object) -> ms_recorder_ring: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_replication *", "struct ms_replication[]"], value: object) -> ms_replication: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_replicator_lines *", "struct ms_replicator_lines[]"], value: object) -> ms_replicator_lines: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_reput *", "struct ms_reput[]"], value: object) -> ms_reput: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_row_filter *", "struct ms_row_filter[]"], value: object) -> ms_row_filter: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_seal *", "struct ms_seal[]"], value: object) -> ms_seal: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_segment *", "struct ms_segment[]"], value: object) -> ms_segment: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_selection *", "struct ms_selection[]"], value: object) -> ms_selection: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_send *", "struct ms_send[]"], value: object) -> ms_send: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_send_topic *", "struct ms_send_topic[]"], value: object) -> ms_send_topic: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_sends *", "struct ms_sends[]"], value: object) -> ms_sends: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_sequence *", "struct ms_sequence[]"], value: object) -> ms_sequence: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_session *", "struct ms_session[]"], value: object) -> ms_session: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_session_account *", "struct ms_session_account[]"], value: object) -> ms_session_account: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_session_slot *", "struct ms_session_slot[]"], value: object) -> ms_session_slot: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stall *", "struct ms_stall[]"], value: object) -> ms_stall: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stall_minute *", "struct ms_stall_minute[]"], value: object) -> ms_stall_minute: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_state *", "struct ms_state[]"], value: object) -> ms_state: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stats_history *", "struct ms_stats_history[]"], value: object) -> ms_stats_history: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stats_sample *", "struct ms_stats_sample[]"], value: object) -> ms_stats_sample: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stats_snapshot *", "struct ms_stats_snapshot[]"], value: object) -> ms_stats_snapshot: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_store_stats *", "struct ms_store_stats[]"], value: object) -> ms_store_stats: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_stream *", "struct ms_stream[]"], value: object) -> ms_stream: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_sync_stats *", "struct ms_sync_stats[]"], value: object) -> ms_sync_stats: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_tally *", "struct ms_tally[]"], value: object) -> ms_tally: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_tally_group *", "struct ms_tally_group[]"], value: object) -> ms_tally_group: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_text *", "struct ms_text[]"], value: object) -> ms_text: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_topic_count *", "struct ms_topic_count[]"], value: object) -> ms_topic_count: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_topic_stats *", "struct ms_topic_stats[]"], value: object) -> ms_topic_stats: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_touched_queue *", "struct ms_touched_queue[]"], value: object) -> ms_touched_queue: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_undo *", "struct ms_undo[]"], value: object) -> ms_undo: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_waiting *", "struct ms_waiting[]"], value: object) -> ms_waiting: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_walk *", "struct ms_walk[]"], value: object) -> ms_walk: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_worker *", "struct ms_worker[]"], value: object) -> ms_worker: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_writer *", "struct ms_writer[]"], value: object) -> ms_writer: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_writer_lines *", "struct ms_writer_lines[]"], value: object) -> ms_writer_lines: ...
    @overload
    def cast(self, cdecl: Literal["struct ms_writer_session *", "struct ms_writer_session[]"], value: object) -> ms_writer_session: ...
    @overload
    def cast(self, cdecl: Literal["int8_t *", "int8_t[]", "int8_t[2]", "uint8_t *", "uint8_t[]", "uint8_t[2]", "int32_t *", "int32_t[]", "int32_t[2]", "uint32_t *", "uint32_t[]", "uint32_t[2]", "int64_t *", "int64_t[]", "int64_t[2]", "uint64_t *", "uint64_t[]", "uint64_t[2]", "int *", "int[]", "int[2]", "uint16_t *", "uint16_t[]", "uint16_t[2]", "int16_t *", "int16_t[]", "int16_t[2]"], value: object) -> Array[int]: ...
    @overload
    def cast(self, cdecl: Literal["char *", "char[]"], value: object) -> Array[bytes]: ...
    @overload
    def cast(self, cdecl: str, value: object) -> _CData: ...
    def buffer(self, cdata: _CData, size: int = -1) -> CBuffer: ...
    @overload
    def from_buffer(self, memory: Buffer, *, require_writable: bool = False) -> Array[bytes]: ...
    @overload
    def from_buffer(self, cdecl: str, memory: Buffer, require_writable: bool = False) -> Array[int]: ...
    def gc(self, cdata: _C, destructor: Callable[[_C], object], size: int = 0) -> _C: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    def memmove(self, to: _CData | Buffer, source: _CData | Buffer, size: int) -> None: ...
    def offsetof(self, cdecl: str, *fields: str | int) -> int: ...
    def release(self, cdata: _CData) -> None: ...
    def sizeof(self, cdecl: str | _CData) -> int: ...
    def string(self, cdata: _CData, maxlen: int = -1) -> bytes: ...
    def typeof(self, cdecl: str | _CData) -> Any: ...  # a CType: cffi describes types for programs, not for type checkers

ffi: _FFI
lib: _Lib