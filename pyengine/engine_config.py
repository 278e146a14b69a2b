"""EngineConfig: every setting of a store, typed, checked, with RocketMQ's names.

The class body is the table of settings: documentation, `config explain` and error
sentences are made from it. Names are RocketMQ's (MessageStoreConfig of 4.9.8)
in snake_case with the unit appended; defaults are RocketMQ's where it has the setting.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from pyengine.arguments import INT32_MAX
from pyengine.errors import ConfigError, UsageError
from pyengine.formats.delayed_message import DEFAULT_MESSAGE_DELAY_LEVEL, parse_delay_levels
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record import encode_host
from pyengine.settings import Setting, of_rocketmq, setting, settings_of, split_address

DAY_MS = 86_400_000
SLAVE = "SLAVE"  # a broker_role
HA_PORT = 10_912  # RocketMQ's default
CLUSTER_BYTES_MAX = 256  # of the property CLUSTER (csrc/sends.cdef.h)

# For whom a setting that is changed while the engine runs takes effect.
AT_ONCE = "at once"
PRODUCERS = "for producers that connect afterwards"
READERS = "for readers that are opened afterwards"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The settings that file sizes and positions depend on, alone; the defaults are RocketMQ's."""

    mapped_file_size_commit_log_bytes: int = 1 << 30
    mapped_file_size_consume_queue_bytes: int = 6_000_000
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    mapped_file_size_consume_queue_ext_bytes: int = 48 << 20

    @property
    def index_layout(self) -> IndexLayout:
        """Where slots and entries of an index file begin."""
        return IndexLayout(self.max_hash_slot_num, self.max_index_num)


MODES: Mapping[str, Mapping[str, str]] = {
    "async": {"flush_disk_type": "ASYNC_FLUSH", "transient_store_pool_enable": "false"},
    "pool": {"flush_disk_type": "ASYNC_FLUSH", "transient_store_pool_enable": "true"},
    "sync": {"flush_disk_type": "SYNC_FLUSH", "transient_store_pool_enable": "false"},
}
"""The settings that choose each write path; see EngineConfig.mode."""


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one store, from load_config.

    `origins` says where each value that is not the default came from: "files", "engine.toml", "environment" or "--set".
    """

    # -- sizes of the store's files: fixed at creation
    mapped_file_size_commit_log_bytes: int = of_rocketmq(1 << 30, "Size of one commit log segment.", low=1024, fixed=True, group="files")
    mapped_file_size_consume_queue_bytes: int = of_rocketmq(
        6_000_000, "Size of one consume queue file; rounded up to a multiple of 20.", low=20, high=INT32_MAX - 27, multiple_of=20,
        fixed=True)
    mapped_file_size_consume_queue_ext_bytes: int = of_rocketmq(48 << 20, "Size of one consume queue extension file.", low=64, fixed=True)
    max_hash_slot_num: int = of_rocketmq(5_000_000, "Hash slots of one index file.", high=500_000_000, fixed=True)
    max_index_num: int = of_rocketmq(
        20_000_000, "Entries of one index file (one less is usable, as in RocketMQ).", low=2, high=107_000_000, fixed=True)

    store_path_commit_log: str = of_rocketmq("", "Folders for new segments of the log, separated by `,`. Empty: `commitlog`.")
    read_only_commit_log_store_paths: str = of_rocketmq("", "Folders of the log that get no new segments, separated by `,`.")

    # -- how messages are written and made durable
    flush_disk_type: str = of_rocketmq(
        "ASYNC_FLUSH", "What PUT_OK waits for: the page cache (ASYNC_FLUSH) or the disk (SYNC_FLUSH).",
        choices=("ASYNC_FLUSH", "SYNC_FLUSH"), group="writing")
    transient_store_pool_enable: bool = of_rocketmq(
        False, "Append to locked memory buffers, and commit from them to the files; not with SYNC_FLUSH or on a SLAVE.")
    transient_store_pool_size: int = of_rocketmq(5, "Number of those buffers, each of one segment's size.", low=2, high=64)
    flush_interval_commit_log_ms: int = of_rocketmq(500, "Longest time that bytes stay unflushed with ASYNC_FLUSH.", live=AT_ONCE)
    commit_interval_commit_log_ms: int = of_rocketmq(200, "Longest pause between two commits of buffered bytes.", live=AT_ONCE)
    sync_flush_timeout_ms: int = of_rocketmq(5000, "A put with SYNC_FLUSH that waits longer gets FLUSH_DISK_TIMEOUT.", live=PRODUCERS)
    zero_ahead_bytes: int = setting(
        256 << 10, "With SYNC_FLUSH: how far ahead the writer writes zeros, so that a sync changes data only.", low=0, high=64 << 20)
    put_timeout_ms: int = setting(10_000, "Longest wait of a put for the writer; then its result is indeterminate.", live=PRODUCERS)
    default_topic_queue_nums: int = of_rocketmq(0, "Queues of a new topic. 0: 1 for a put's, 8 for a gateway client's.", low=0, high=65_536)
    transaction_timeout_ms: int = of_rocketmq(
        6000, "A producer is asked about its undecided transaction after this time.", key="transactionTimeOut", low=0)
    transaction_check_max: int = of_rocketmq(15, "How often it is asked; then the message goes to TRANS_CHECK_MAX_TIME_TOPIC.", low=0)
    transaction_check_interval_ms: int = of_rocketmq(60_000, "Time between two rounds of questions.")
    max_message_size_bytes: int = of_rocketmq(
        4 << 20, "Longest body of one message; the record may be 64 KiB longer.", high=INT32_MAX - 65536)
    message_delay_level: str = of_rocketmq(DEFAULT_MESSAGE_DELAY_LEVEL, "Delays by level, from level 1, each a number and s, m, h or d.")
    os_page_cache_busy_timeout_ms: int = of_rocketmq(
        1000, "While an append takes longer, puts get OS_PAGECACHE_BUSY.", key="osPageCacheBusyTimeOutMills", live=AT_ONCE)
    broker_role: str = of_rocketmq(
        "ASYNC_MASTER", "Role of this store; a SLAVE refuses puts.", choices=("ASYNC_MASTER", "SYNC_MASTER", SLAVE))
    flush_delay_offset_interval_ms: int = of_rocketmq(
        10_000, "Shortest pause between two writes of delayOffset.json; a crash repeats deliveries since the last.", live=AT_ONCE)
    store_host: str = setting("127.0.0.1:10911", "Address in each record and message id: IPv4:port or [IPv6]:port.")
    replay_clock: bool = setting(False, "Let a replay set the store's clock; delayed messages and retries wait.")

    # -- replication
    ha_listen_port: int = of_rocketmq(
        0, "Port where a master waits for slaves. 0: 10912 with SYNC_MASTER, and with ASYNC_MASTER no replication.", low=0, high=65_535,
        group="replication")
    ha_listen_host: str = setting("127.0.0.1", "Address that a master listens at.")
    ha_secret_file: str = setting(
        "", "File with the secret of a master and its slaves, mode 0600, relative to the store. Without it and ha_allow_plain a master "
        "refuses every slave.")
    ha_peers: str = setting(
        "", "On a master: HA ports (host:port, separated by `,`) of stores that may become master instead. Needs ha_secret_file; `pyengine "
        "promote` sets it.")
    ha_allow_plain: str = setting("", "Addresses and networks, separated by `,`, that may use RocketMQ's own protocol without the secret.")
    ha_master_address: str = of_rocketmq("", "With SLAVE: host:port of the master's HA port. Empty: as namesrv_addr tells it.")
    slave_timeout_ms: int = of_rocketmq(
        3000, "With SYNC_MASTER: a put that is not confirmed in this time gets FLUSH_SLAVE_TIMEOUT.", live=PRODUCERS)
    min_in_sync_replicas: int = setting(1, "Slaves that confirm a message.", high=16)
    ha_slaves_share_hosts: bool = setting(False, "With min_in_sync_replicas of 2 or more: each link from one address counts.")
    ha_slave_fallbehind_max_bytes: int = of_rocketmq(
        268_435_456, "With SYNC_MASTER: when slaves lag more, puts get SLAVE_NOT_AVAILABLE at once.", low=0, live=AT_ONCE)
    dispatch_at: str = setting(
        "committed", "When messages enter their queues: once readable, or once slaves have confirmed them.",
        choices=("committed", "replicated"))
    sync_from: str = setting("last", "Where a new slave begins: at its master's last segment, or at the first.", choices=("last", "first"))
    ack_level: str = setting(
        "auto", "When a slave acknowledges. auto: flushed with SYNC_FLUSH, otherwise written.", choices=("auto", "written", "flushed"))
    ha_compare_bytes: int = setting(1 << 20, "How much of its log's end a slave compares when it connects.", low=0)
    ha_cut: str = setting(
        "unconfirmed", "What a slave may move to quarantine where its log differs. any: a SYNC_MASTER also starts without what its slaves "
        "have.", choices=("unconfirmed", "any"))
    ha_connections_max: int = setting(16, "Most links to a master at a time.", high=256)
    ha_transfer_batch_size_bytes: int = of_rocketmq(32_768, "Longest piece of the log in one frame.", high=1 << 24)
    ha_send_heartbeat_interval_ms: int = of_rocketmq(5000, "Time without sending after which a side sends a heartbeat.")
    ha_housekeeping_interval_ms: int = of_rocketmq(
        20_000, "A link that is silent for this time is closed; a new slave waits three times as long for its master.")

    # -- clients of RocketMQ
    gateway_enable: bool = setting(False, "Run the gateway for RocketMQ clients.", group="gateway")
    gateway_listen_host: str = setting("127.0.0.1", "Address that the gateway listens at.")
    gateway_namesrv_port: int = setting(9876, "Port of its name server; 0: any.", low=0, high=65_535)
    gateway_broker_port: int = setting(10_911, "Port of its broker, which also serves at this port less 2; 0: any.", low=0, high=65_535)
    gateway_advertised_host: str = of_rocketmq(
        "", "Address in routes and, if numeric, message ids. Empty: where it listens.", key="brokerIP1")
    broker_name: str = of_rocketmq("broker-a", "Name of the gateway's broker in routes.")
    broker_cluster_name: str = of_rocketmq("DefaultCluster", "Name of its cluster.")
    broker_id: int = of_rocketmq(0, "A slave's number in routes; 0: 1. A master's is 0.", low=0)
    slave_read_enable: bool = of_rocketmq(False, "Groups far behind read from slaves.")
    namesrv_addr: str = of_rocketmq("", "Name servers of a cluster, `host:port;host:port`. Empty: `$NAMESRV_ADDR`.")
    gateway_namesrv_cluster: bool = setting(False, "Its own name server runs too, and takes brokers: namesrv_addr names it.")
    gateway_namesrv_ca_file: str = setting("", "CAs of those name servers, as PEM; empty: no TLS.")
    auto_create_topic_enable: bool = of_rocketmq(True, "A client's first message to an unknown topic creates it.")
    auto_create_subscription_group: bool = of_rocketmq(True, "A client of an unknown group creates it.")
    gateway_connections_max: int = setting(1024, "Most connections at a time.", high=65_536)
    gateway_address_connections_max: int = setting(
        0, "Most connections from one address; 0: half of gateway_connections_max.", low=0, high=65_536)
    gateway_idle_timeout_ms: int = setting(120_000, "A connection without a request or answer for so long is closed.", low=1000)
    gateway_frame_max_bytes: int = setting(16 << 20, "Longest request; a longer one closes its connection.", low=65_536, high=1 << 30)
    gateway_connection_max_bytes: int = setting(
        32 << 20, "Most bytes that wait for one connection, or five times its longest answer; then it is not read, or closed.",
        low=1 << 20, high=1 << 32)
    gateway_memory_max_bytes: int = setting(
        256 << 20, "Most bytes that wait for all; then connections that hold much are closed.", low=1 << 20, high=1 << 40)

    acl_enable: bool = of_rocketmq(False, "Requests need an access key and a signature.")
    gateway_acl_file: str = setting("config/plain_acl.yml", "The access list, mode 600, relative to the store.")
    gateway_tls_mode: str = setting(
        "disabled", "Whether the ports take TLS: no, too, or only; gRPC's only, see grpc_plain_port.",
        choices=("disabled", "permissive", "enforcing"))
    gateway_tls_cert_file: str = setting("", "The gateway's certificates up to its CA, as PEM, relative to the store.")
    gateway_tls_key_file: str = setting("", "Its private key, as PEM without a password, mode 600.")
    gateway_tls_client_ca_file: str = setting("", "CAs of clients, as PEM.")
    gateway_tls_client_auth: str = setting(
        "none", "Whether a client needs one: no, only a valid one if any, or yes.", choices=("none", "optional", "require"))
    grpc_enable: bool = setting(False, "Serve RocketMQ 5's clients by gRPC, and run the gateway; needs `pyengine-store[grpc]`.")
    grpc_listen_host: str = setting("127.0.0.1", "Where gRPC listens.")
    grpc_port: int = setting(8081, "Its port; 0: any.", low=0, high=65_535)
    grpc_plain_port: int = setting(0, "With permissive TLS: one more port, without TLS; 0: none.", low=0, high=65_535)
    grpc_calls_max: int = setting(4096, "Most calls at a time; half from one address.", high=1 << 20)

    # -- queues, index, recovery
    message_index_enable: bool = of_rocketmq(True, "Keep the key index.", group="dispatch")
    flush_interval_consume_queue_ms: int = of_rocketmq(1000, "Pause between two flushes of the consume queues.", live=AT_ONCE)
    enable_consume_queue_ext: bool = of_rocketmq(False, "Queue entries carry addresses of extension units.")
    enable_lmq: bool = of_rocketmq(False, "Light queues (%LMQ%...) are allowed.")
    enable_multi_dispatch: bool = of_rocketmq(False, "A message enters every queue that INNER_MULTI_DISPATCH names.")
    max_lmq_consume_queue_num: int = of_rocketmq(20_000, "Most light queues in a store's life.", low=0)
    check_crc_on_recover: bool = of_rocketmq(True, "Recovery checks each body's CRC.", key="checkCRCOnRecover")

    # -- reading
    access_message_in_memory_max_ratio: int = of_rocketmq(
        40, "This share of memory before the log's end counts as in memory.", low=0, live=READERS, group="reading")
    max_transfer_bytes_on_message_in_memory_bytes: int = of_rocketmq(262_144, "Most bytes of one get from memory.", live=READERS)
    max_transfer_count_on_message_in_memory: int = of_rocketmq(32, "Most messages of one get from memory.", live=READERS)
    max_transfer_bytes_on_message_in_disk_bytes: int = of_rocketmq(65_536, "Most bytes of one get from the disk.", live=READERS)
    max_transfer_count_on_message_in_disk: int = of_rocketmq(8, "Most messages of one get from the disk.", live=READERS)

    # -- deleting old messages, and the room on the disk
    file_reserved_time_hours: int = of_rocketmq(
        72, "Age, by the file's modification time, from which a segment may be deleted.", low=0, live=AT_ONCE, group="cleaning")
    log_retention_bytes: int = setting(
        0, "Above this size of the log its oldest segments are deleted, but none that a reader holds; 0: no limit.", low=0, high=1 << 62,
        live=AT_ONCE)
    delete_when: str = of_rocketmq("04", "Hours of the day, local time, in which old segments are deleted, as in 04;16.", live=AT_ONCE)
    clean_resource_interval_ms: int = of_rocketmq(10_000, "Pause between two rounds of deletion.", live=AT_ONCE)
    delete_files_batch_max: int = setting(10, "Most segments that one round deletes.", live=AT_ONCE)
    delete_commit_log_files_interval_ms: int = of_rocketmq(100, "Pause between two deletions of segments.", low=0, live=AT_ONCE)
    delete_consume_queue_files_interval_ms: int = of_rocketmq(100, "Pause after deleting files of one queue.", low=0, live=AT_ONCE)
    destroy_mapped_file_interval_forcibly_ms: int = of_rocketmq(
        120_000, "After this time a segment is deleted although a reader holds it.", key="destroyMapedFileIntervalForcibly", low=0,
        live=AT_ONCE)
    redelete_hanged_file_interval_ms: int = of_rocketmq(120_000, "Pause between two tries on a held segment.", live=AT_ONCE)
    disk_max_used_space_ratio: int = of_rocketmq(
        75, "Above this disk use old segments are deleted at any hour.", low=10, high=95, live=AT_ONCE)
    disk_space_clean_forcibly_ratio: int = of_rocketmq(
        85, "Above this disk use the oldest segments are deleted whatever their age.", live=AT_ONCE)
    disk_space_warning_level_ratio: int = of_rocketmq(90, "Above this disk use puts are refused.", live=AT_ONCE)
    disk_space_enough_bytes: int = setting(
        16 << 30, "With this much room left only disk_max_used_space_ratio counts.", low=0, high=1 << 62, live=AT_ONCE)
    clean_file_forcibly_enable: bool = of_rocketmq(True, "Let disk use delete segments before their age.", live=AT_ONCE)

    # -- processes and shared memory
    shm_directory: str = setting("/dev/shm", "Folder of the shared memory objects; a tmpfs.", group="processes")
    sessions_max: int = setting(256, "Most producers at one time, 1,021 if it is higher.", high=1024)
    session_ring_bytes: int = setting(4 << 20, "Ring of one producer; a power of two.", low=65_536, high=1 << 30, live=PRODUCERS)
    spin: int = setting(
        -1, "How long writer and producers poll before they sleep. auto measures it at start.", unit="us", low=0, high=100_000,
        words={"auto": -1})
    warm_mapped_file_enable: bool = of_rocketmq(False, "Fill and lock all of a new segment's pages.", key="warmMapedFileEnable")

    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, row in SETTINGS.items():
            object.__setattr__(self, name, row.read(getattr(self, name), self.origins.get(name, "argument")))
        index_file_bytes = self.geometry.index_layout.size_bytes
        if index_file_bytes > INT32_MAX:
            raise ConfigError(
                f"max_hash_slot_num = {self.max_hash_slot_num} and max_index_num = {self.max_index_num} make an index "
                f"file of {index_file_bytes:,} bytes: keep 40 + 4 x slots + 20 x entries at {INT32_MAX:,} or less")
        if self.session_ring_bytes & (self.session_ring_bytes - 1):
            raise ConfigError(f"session_ring_bytes = {self.session_ring_bytes} is not a power of two")
        if not os.path.isabs(self.shm_directory):
            raise ConfigError(f"shm_directory = {self.shm_directory} is not an absolute path: processes in other directories use it too")
        try:
            encode_host(self.store_host)
        except UsageError:
            raise ConfigError(f"store_host = {self.store_host} is not an address: give IPv4:port or [IPv6]:port, as in 127.0.0.1:10911"
                              ) from None
        self._check_replication()
        self._check_tls()
        if self.grpc_enable and not self.gateway_enable:
            if "gateway_enable" in self.origins:
                raise ConfigError("grpc_enable needs the gateway, which serves its requests: leave out gateway_enable=false")
            object.__setattr__(self, "gateway_enable", True)
        self._check_cluster()
        parse_delay_levels(self.message_delay_level)
        delete_hours(self.delete_when)

    @property
    def ha_peer_list(self) -> list[str]:
        """The addresses of `ha_peers`, for a master with a secret: a term counts only from a store that proves to have it too."""
        if self.broker_role == SLAVE or not self.ha_secret_file:
            return []
        return [text.strip() for text in self.ha_peers.split(",") if text.strip()]

    @property
    def ha_allow_plain_list(self) -> list[str]:
        """The addresses and networks of `ha_allow_plain`."""
        return [text.strip() for text in self.ha_allow_plain.split(",") if text.strip()]

    def _check_replication(self) -> None:
        if self.ha_allow_plain:
            from ipaddress import ip_network

            for text in self.ha_allow_plain_list:
                try:
                    ip_network(text)
                except ValueError as error:
                    raise ConfigError(f"ha_allow_plain: {error}: give addresses and networks, as in 10.0.0.7 or 10.0.0.0/24,::1") from None
        for name, address in [("ha_master_address", self.ha_master_address), *(("ha_peers", one) for one in self.ha_peer_list)]:
            if address and not _has_port(address):
                raise ConfigError(f"{name} = {address} is not an address: give host:port, as in 10.0.0.1:10912 or [::1]:10912")
        if self.dispatch_at == "replicated" and self.ha_port == 0 and self.broker_role != SLAVE:
            raise ConfigError("dispatch_at = replicated needs a master with slaves: set ha_listen_port, or nothing would ever "
                              "become visible")
        if self.ha_port and self.min_in_sync_replicas > self.ha_connections_max:
            raise ConfigError(f"min_in_sync_replicas = {self.min_in_sync_replicas} is more than ha_connections_max = "
                              f"{self.ha_connections_max}, so that no message would ever be confirmed: raise ha_connections_max")

    def _check_tls(self) -> None:
        if self.gateway_tls_mode != "disabled" and not (self.gateway_tls_cert_file and self.gateway_tls_key_file):
            raise ConfigError(f"gateway_tls_mode = {self.gateway_tls_mode} needs a certificate: set gateway_tls_cert_file and "
                              "gateway_tls_key_file")
        if self.gateway_tls_client_auth != "none" and not self.gateway_tls_client_ca_file:
            raise ConfigError(f"gateway_tls_client_auth = {self.gateway_tls_client_auth} needs the CAs of clients: set "
                              "gateway_tls_client_ca_file")
        if self.grpc_plain_port and self.gateway_tls_mode != "permissive":
            raise ConfigError(f"grpc_plain_port = {self.grpc_plain_port} needs gateway_tls_mode = permissive: with disabled grpc_port "
                              "takes clients without TLS, with enforcing no port does")

    @property
    def name_servers(self) -> list[str]:
        """The addresses of `namesrv_addr`, each once."""
        return list(dict.fromkeys(text.strip() for text in self.namesrv_addr.split(";") if text.strip()))

    @property
    def number_in_routes(self) -> int:
        """The gateway's broker among those of its name: 0 for a master."""
        return (self.broker_id or 1) if self.broker_role == SLAVE else 0

    def _check_cluster(self) -> None:
        if (cluster_bytes := len(os.fsencode(self.broker_cluster_name))) > CLUSTER_BYTES_MAX:
            raise ConfigError(f"broker_cluster_name has {cluster_bytes} bytes: give it {CLUSTER_BYTES_MAX} at most")
        for address in self.name_servers:
            if not _has_port(address):
                raise ConfigError(f"namesrv_addr: {address} is not an address: give host:port, as in 10.0.0.1:9876;10.0.0.2:9876")
        if self.gateway_namesrv_cluster and not self.name_servers:
            raise ConfigError("gateway_namesrv_cluster needs namesrv_addr: the name server of each host of the cluster, this one's too")
        is_anywhere = not self.gateway_advertised_host and self.gateway_listen_host in ("", "0.0.0.0", "::")
        if self.name_servers and self.gateway_enable and is_anywhere:
            raise ConfigError("namesrv_addr needs the address by which clients of the cluster reach this host: set gateway_advertised_host")

    @property
    def ha_port(self) -> int:
        """The port at which a master waits for slaves; 0 where it does not listen."""
        if self.broker_role == SLAVE:
            return 0
        return self.ha_listen_port or (HA_PORT if self.broker_role == "SYNC_MASTER" else 0)

    @property
    def replicates(self) -> bool:
        """Whether the engine has a replicator: a master that listens or has peers, or a slave that has a master."""
        return (self.ha_port != 0 or bool(self.ha_peer_list) or self.broker_role == SLAVE and self.ha_master_address != ""
                or self.learns_master)

    @property
    def learns_master(self) -> bool:
        """Whether name servers tell a slave where its master is, since its settings do not."""
        return self.broker_role == SLAVE and not self.ha_master_address and self.gateway_enable and bool(self.name_servers)

    @property
    def acks_flushed(self) -> bool:
        """Whether a slave acknowledges only what it has flushed."""
        return self.ack_level == "flushed" or self.ack_level == "auto" and self.flush_disk_type == "SYNC_FLUSH"

    @property
    def geometry(self) -> Geometry:
        """The sizes that the store's files depend on, as storage works with them."""
        return Geometry(**{name: getattr(self, name) for name in FIXED_NAMES})

    @property
    def pool_enabled(self) -> bool:
        """Whether writes go through the buffer pool: RocketMQ's rule for isTransientStorePoolEnable."""
        return (self.transient_store_pool_enable and self.flush_disk_type == "ASYNC_FLUSH"
                and self.broker_role != SLAVE)

    @property
    def pool_bytes(self) -> int:
        """What the pool takes of shared memory; 0 without one."""
        return self.transient_store_pool_size * self.mapped_file_size_commit_log_bytes if self.pool_enabled else 0

    @property
    def mode(self) -> str:
        """The write path: "async", "pool" or "sync"."""
        if self.flush_disk_type == "SYNC_FLUSH":
            return "sync"
        return "pool" if self.pool_enabled else "async"

    @property
    def put_topic_queue_nums(self) -> int:
        """Queues of a topic that a put makes."""
        return self.default_topic_queue_nums or 1

    @property
    def own_topics(self) -> frozenset[str]:
        """The topics that a broker makes of its name and its cluster's."""
        return frozenset((self.broker_name, self.broker_cluster_name, f"{self.broker_cluster_name}_REPLY_TOPIC"))

    @property
    def client_topic_queue_nums(self) -> int:
        """Queues of a topic that a client of RocketMQ makes, unless it asks for fewer."""
        return self.default_topic_queue_nums or 8

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of level 1, 2, ... in milliseconds."""
        return parse_delay_levels(self.message_delay_level)

    def overrides(self) -> dict[str, str]:
        """Return what a child process must be given, as text."""
        given = {name for name, origin in self.origins.items() if origin in ("environment", "--set")}
        return {name: SETTINGS[name].show(getattr(self, name)) for name in SETTINGS if name in given or name in FIXED_NAMES}

    def explain(self) -> list[tuple[str, str, str, str]]:
        """Return (name, value, default, origin) of every setting."""
        return [(name, row.show(getattr(self, name)), row.show(row.default), self.origins.get(name, "default"))
                for name, row in SETTINGS.items()]


def delete_hours(text: str) -> frozenset[int]:
    """The hours of RocketMQ's notation `04;16`; ConfigError names the piece that is wrong."""
    pieces = [piece.strip() for piece in text.split(";") if piece.strip()]
    for piece in pieces:
        if not (piece.isascii() and piece.isdecimal() and int(piece) <= 23):
            raise ConfigError(f"delete_when: {piece!r} is not an hour: give numbers from 00 to 23, as in '04' or '04;16'")
    if not pieces:
        raise ConfigError("delete_when is empty: give at least one hour, as in '04'")
    return frozenset(map(int, pieces))


def _has_port(address: str) -> bool:
    try:
        return split_address(address)[1] > 0
    except ValueError:
        return False


SETTINGS: dict[str, Setting] = settings_of(EngineConfig)
FIXED_NAMES: tuple[str, ...] = tuple(name for name, row in SETTINGS.items() if row.fixed)
# Settings that say what a store's messages and queues hold, how many queues a topic has and where its log is: kept in its
# engine.toml, so that every command and producer knows them.
KEPT_NAMES: tuple[str, ...] = (
    "store_host",
    "enable_multi_dispatch", "enable_lmq", "enable_consume_queue_ext", "message_delay_level", "default_topic_queue_nums",
    "transaction_timeout_ms", "transaction_check_max", "transaction_check_interval_ms",
    "store_path_commit_log", "read_only_commit_log_store_paths",
)


if TYPE_CHECKING:
    from pyengine._settings import Keywords  # setup.py writes it
else:

    def _type_of(row):
        words = Literal[*row.words] if row.words else str
        return {bool: bool | words, int: int | str, str: words}[row.kind]

    Keywords = TypedDict("Keywords", {name: _type_of(row) for name, row in SETTINGS.items()}, total=False)


class EngineSettings(Keywords, total=False):
    """Settings as keywords, for type checkers and editors (docs/configuration.md). Numbers may be text: "16MiB", "5s"."""


def keywords(settings: Mapping[str, object]) -> EngineSettings:
    """Return settings that are checked when they are used, such as those of a command line, as keywords."""
    return cast(EngineSettings, settings)
